"""Modules of the user, imported in a child process before Ray starts."""

import logging
import os
import sys
from pathlib import Path

import psutil
import pytest

from verl.errors import WrongInput
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run import user_code
from verl.trainer.run.user_code import UserCode, check_engine, check_user_code
from verl.workers.config.engines import Demand

HERE = RayConfig()
ESTIMATOR = """
from verl.algos.advantage import register_adv_est
print("noise")
class Outer:
    class Tool: ...
@register_adv_est("mine")
def estimate(**given): ...
"""
ENGINE = """
from verl.workers.config.engines import EngineFacts
from verl.workers.rollout import BaseRollout, HFRollout
class Good(HFRollout):
    facts = EngineFacts(devices=("cpu",), loads_checkpoints=True)
class Unfinished(BaseRollout): ...
class Plain: ...
"""
MODULES = {
    "engine": ENGINE,
    "mine": ESTIMATOR,
    "lacks": "import no_such_module\n",
    "raises": "raise SystemExit('bye')\n",
    "ends": "import os\nos._exit(3)\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def code(module: str, name: str = "mine", **classes: str) -> UserCode:
    return UserCode({"model.external_lib": [module]}, classes, {"algorithm.adv_estimator": name})


def test_a_name_that_nothing_registers_is_refused() -> None:
    with pytest.raises(WrongInput, match="algorithm.adv_estimator=mien: Unknown advantage estimator: mine does not"):
        check_user_code(code("mine", "mien"), HERE)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("lacks", "model.external_lib=lacks: not looked at: cannot be imported by this process (ModuleNotFoundError"),
        ("nowhere", "model.external_lib=nowhere: not looked at: cannot be imported by this process"),
        ("raises", "model.external_lib=raises: not looked at: cannot be imported by this process (SystemExit: bye)"),
        ("ends", "model.external_lib=ends: not looked at: the process that imports it ended with code 3"),
    ],
)
def test_what_cannot_be_looked_at_is_a_notice(module: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_user_code(code(module, "mien"), HERE)
    assert says in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    "ray_init",
    [
        {"address": "10.0.0.1:6379"},
        {"runtime_env": {"pip": ["mine"]}},
        {"runtime_env": {"env_vars": {"PYTHONPATH": "/elsewhere"}}},
    ],
    ids=["another machine", "packages", "another path"],
)
def test_where_the_run_imports_elsewhere_all_is_a_notice(
    ray_init: dict[str, object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "_answer", lambda code: (["a=b: is missing"], []))
    with caplog.at_level(logging.WARNING):
        check_user_code(code("mine"), RayConfig(ray_init=ray_init))
    assert "a=b: is missing (here; the run imports it in" in caplog.text


def test_variables_of_other_kinds_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_answer", lambda code: (["a=b: is missing"], []))
    with pytest.raises(WrongInput, match="a=b: is missing"):
        check_user_code(code("mine"), RayConfig(ray_init={"runtime_env": {"env_vars": {"HF_TOKEN": "t"}}}))


def test_an_import_without_end_is_a_notice_and_leaves_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(10_000)\n")
    monkeypatch.setattr(user_code, "TIME_LIMIT_S", 0.5)  # the process starts, and has not ended by then in any case
    with caplog.at_level(logging.WARNING):
        check_user_code(code("sleeps"), HERE)
    assert "model.external_lib=sleeps: not looked at: its import did not end within 0.5 s" in caplog.text
    mine = psutil.Process(os.getpid()).children(recursive=True)
    assert not [each for each in mine if "verl.trainer.run.user_code" in each.cmdline()]


LEAST = Demand("actor_rollout_ref.rollout", "sync", "cpu", 1, "dummy", False)


def test_what_a_module_registers_and_classes_that_are_there_pass(caplog: pytest.LogCaptureFixture) -> None:
    check_engine(LEAST, "vllm", HERE)
    right = code("mine", tool="mine.Outer", nested="mine.Outer.Tool")
    right.classes[f"{LEAST.node}.name"] = "engine.Good"
    right.demands[f"{LEAST.node}.name"] = [*LEAST]
    check_user_code(right, HERE)
    assert not {"mine", "engine"} & sys.modules.keys() and not caplog.records


def test_engines_answer_for_themselves_and_what_is_none_is_refused() -> None:
    """All in one child, which takes seconds to import what they are derived from."""
    asked = LEAST._replace(mode="async", device="cuda", num_workers=2, share_weights=True)
    classes = {"a": "engine.God", "b": "engine.Plain", "c": "engine.Unfinished", LEAST.node: "engine.Good"}
    demands = {f"{node}.name": [*asked._replace(node=node)] for node in classes}
    with pytest.raises(WrongInput) as raised:
        check_user_code(
            UserCode(classes={f"{node}.name": name for node, name in classes.items()}, demands=demands), HERE
        )
    for says in (
        "a.name=engine.God: engine has no God: write one of its classes: Good",
        "b.name=engine.Plain: is no rollout engine: derive the class from",
        "c.name=engine.Unfinished: lacks generate_sequences, load, source_checksum",
        "actor_rollout_ref.rollout.mode=async: is not supported by Good: write",
        "trainer.device=cuda: is not supported by Good: write cpu",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2: x data_parallel_size must be 1",
        "actor_rollout_ref.rollout.share_weights=true: is not supported by Good: write false",
    ):
        assert says in str(raised.value)
