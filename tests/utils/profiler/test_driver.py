"""The driver: in which steps it starts and stops the profilers of which groups."""

import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.ppo.profiling import absolute_save_paths, check_steps, dump_memory, start_profiling, stop_profiling


class Group:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def start_profile(self, **kwargs):
        self.calls.append((self.name, "start", kwargs))

    def stop_profile(self):
        self.calls.append((self.name, "stop"))

    def dump_memory_snapshot(self, **kwargs):
        self.calls.append((self.name, "dump", kwargs))


def run(steps, continuous=False, total=5, **groups):
    """Return the calls of a run by step."""
    calls = []
    node = {"steps": steps, "profile_continuous_steps": continuous, "tool": "torch"}
    trainer = SimpleNamespace(
        config=OmegaConf.create({"global_profiler": node}),
        ref_in_actor=groups.pop("ref_in_actor", False),
        actor_rollout_wg=Group("actor_rollout", calls),
        **{f"{name}_wg": Group(name, calls) if there else None for name, there in groups.items()},
    )
    by_step = {}
    for step in range(1, total + 1):
        trainer.global_steps, trainer.is_last_step = step, step == total
        start_profiling(trainer, {})
        begun = len(calls)
        stop_profiling(trainer, {})
        by_step[step] = (calls[:begun], calls[begun:])
        calls[:] = []
    return by_step


ALONE = {"ref_policy": False, "critic": False, "rm": False}


@pytest.mark.parametrize(
    ("steps", "continuous", "started", "stopped"),
    [
        (None, False, [], []),
        ([], False, [], []),
        ([2, 3, 5], False, [2, 3, 5], [2, 3, 5]),
        ([2, 3, 5], True, [2, 5], [3, 5]),
        ([5, 6], True, [5], [5]),  # the run ends inside of a capture
    ],
)
def test_which_steps_start_and_stop(steps, continuous, started, stopped):
    by_step = run(steps, continuous, **ALONE)
    assert [step for step, (begun, _) in by_step.items() if begun] == started
    assert [step for step, (_, ended) in by_step.items() if ended] == stopped


def test_every_group_is_started_and_stopped():
    started, stopped = run([1], ref_policy=True, critic=True, rm=True)[1]
    assert started[0] == ("actor_rollout", "start", {"role": "e2e", "profile_step": "1"})
    others = ["ref_policy", "critic", "rm"]
    assert started[1:] == [(name, "start", {"profile_step": "1"}) for name in others]
    assert stopped == [(name, "stop") for name in ["actor_rollout", *others]]
    started, _ = run([1], ref_policy=True, critic=False, rm=False, ref_in_actor=True)[1]
    assert [name for name, *_ in started] == ["actor_rollout"]


@pytest.mark.parametrize(
    ("tool", "steps", "dumped"),
    [("torch", None, False), ("torch_memory", None, True), ("torch_memory", [2], True), ("torch_memory", [1], False)],
)
def test_snapshots_after_a_step(tool, steps, dumped):
    calls = []
    config = OmegaConf.create({"global_profiler": {"tool": tool, "steps": steps}})
    dump_memory(SimpleNamespace(config=config, global_steps=2, actor_rollout_wg=Group("actor_rollout", calls)))
    assert calls == [("actor_rollout", "dump", {"tag": "post_update_step2", "sub_dir": "step2"})] * dumped


def test_steps_that_never_come(caplog):
    config = OmegaConf.create({"global_profiler": {"steps": [2, 9]}})
    with pytest.raises(ConfigError, match=r"global_profiler\.steps=\[2,9\]: steps \[9\] never come, the run has 8"):
        check_steps(config, total_steps=8)
    with caplog.at_level(logging.WARNING):
        check_steps(config, total_steps=9, resumed_step=2)
    assert "[2] are not profiled, the run resumes after step 2" in caplog.text
    check_steps(OmegaConf.create({"global_profiler": {"steps": None}}), total_steps=1)


def test_workers_write_where_the_driver_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roles = {"actor": {"profiler": {"save_path": "out"}}, "rollout": {"profiler": {"save_path": "/abs"}}, "ref": {}}
    config = OmegaConf.create({"global_profiler": {"save_path": "~/x"}, "actor_rollout_ref": roles})
    absolute_save_paths(config)
    assert config.actor_rollout_ref.actor.profiler.save_path == str(tmp_path / "out")
    assert config.actor_rollout_ref.rollout.profiler.save_path == "/abs"
    assert config.global_profiler.save_path.startswith("/")
