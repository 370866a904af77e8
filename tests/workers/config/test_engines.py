"""The names of generation engines, and what a run may ask of one."""

from pathlib import Path

import pytest

from verl.workers.config import RolloutConfig
from verl.workers.config.engine import DEVICES
from verl.workers.config.engines import ENGINES, Demand, EngineFacts, class_outside, media_engine


def test_a_dotted_name_is_that_of_a_class() -> None:
    assert class_outside("mine.engine.Rollout") == "mine.engine.Rollout"
    for name in (*ENGINES, "vlm", "mine.", ".mine", "my-package.Rollout", "???"):
        assert class_outside(name) is None


def test_an_installed_package_declares_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[verl.rollouts]\nfast = mine.engine:Rollout\nvllm = mine.engine:Other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    class_outside.cache_clear()
    assert class_outside("fast") == "mine.engine.Rollout"
    assert class_outside("vllm") is None, "our names are ours"
    assert RolloutConfig(name="fast", engine_kwargs={"fast": {"depth": 3}}).name == "fast"
    class_outside.cache_clear()


def test_a_name_of_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"name=vlm: must be one of vllm, sglang, hf, a class as package\.module\.Class"
    ):
        RolloutConfig(name="vlm")


def test_arguments_of_an_engine_from_outside_stand_below_its_last_name() -> None:
    own = {"Rollout": {"depth": 3}}
    assert RolloutConfig(name="mine.Rollout", engine_kwargs=own).engine_kwargs == own
    with pytest.raises(ValueError, match="engine_kwargs.Rolout=.*: is no engine with arguments: write Rollout, vllm"):
        RolloutConfig(name="mine.Rollout", engine_kwargs={"Rolout": {"depth": 3}})
    with pytest.raises(ValueError, match="engine_kwargs.Rollout=.*: is no engine with arguments: write vllm or sglang"):
        RolloutConfig(name="hf", engine_kwargs=own)


ALL = EngineFacts(("sync", "async"), DEVICES, True, True, True, "mine.Replica")
MOST = Demand("rollout", "async", "npu", 4, "auto", True)


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        (ALL, []),
        (ALL._replace(modes=("sync",)), ["rollout.mode=async: is not supported by Mine: write sync"]),
        (ALL._replace(replica=None), ["rollout.mode=async: is not supported by Mine: write sync"]),
        (ALL._replace(devices=("cpu", "cuda")), ["trainer.device=npu: is not supported by Mine: write cpu or cuda"]),
        (ALL._replace(spans_workers=False), ["rollout.tensor_model_parallel_size=4: x data_parallel_size must be 1"]),
        (ALL._replace(loads_checkpoints=False), ["rollout.load_format=auto: is not supported by Mine, which gets its"]),
        (ALL._replace(shares_weights=False), ["rollout.share_weights=true: is not supported by Mine: write false"]),
    ],
)
def test_a_class_refuses_what_it_does_not_do(facts: EngineFacts, refused: list[str]) -> None:
    found = [*map(str, MOST.refused_by("Mine", facts))]
    assert len(found) == len(refused) and all(map(str.startswith, found, refused))


def test_the_least_demand_is_met_by_the_least_engine() -> None:
    assert not [*Demand("rollout", "sync", "cpu", 1, "dummy", False).refused_by("Mine", EngineFacts())]


def test_data_follows_the_arguments_of_vllm_unless_sglang_generates() -> None:
    assert [media_engine(name) for name in ("vllm", "sglang", "hf", "mine.Rollout", None)] == [
        "vllm",
        "sglang",
        "vllm",
        "vllm",
        "vllm",
    ]
