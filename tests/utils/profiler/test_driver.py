"""The driver: in which steps it starts and stops the profilers of which groups."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import ray_trainer, run_records
from verl.trainer.ppo.loaders import EndOfDataError
from verl.trainer.ppo.profiling import (
    absolute_save_paths,
    captured,
    check_steps,
    dump_memory,
    start_profiling,
    stop_profiling,
)
from verl.trainer.ppo.state import RunState
from verl.utils.profiler import ProfilerConfig


class Group:
    def __init__(self, name, calls, ended=False, fails=False):
        self.name, self.calls, self.ended, self.fails = name, calls, ended, fails
        self.call_timeout_s = 7200.0

    def start_profile(self, **kwargs):
        self.calls.append((self.name, "start", kwargs))

    def stop_profile(self):
        self.calls.append((self.name, "stop"))
        if self.fails:
            raise OSError("no room on the disk")

    def dump_memory_snapshot(self, **kwargs):
        self.calls.append((self.name, "dump", kwargs))


def run(steps, continuous=False, total=5, first=1, groups=()):
    """Return the calls of a run by step; it begins, or goes on, with step ``first``."""
    calls = []
    profiler = ProfilerConfig(steps=steps, profile_continuous_steps=continuous)
    state = RunState(seed=1, total_steps=total)
    groups = {name: Group(name, calls) for name in ["actor_rollout", *groups]}
    by_step = {}
    for step in range(first, total + 1):
        state.step = step
        start, stop = (lambda on: start_profiling(state, groups)), (lambda on: stop_profiling(state))
        with captured(profiler, state, groups, {}, start, stop):
            begun = len(calls)
        by_step[step] = (calls[:begun], calls[begun:])
        calls[:] = []
    return by_step


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
    by_step = run(steps, continuous)
    assert [step for step, (begun, _) in by_step.items() if begun] == started
    assert [step for step, (_, ended) in by_step.items() if ended] == stopped


def test_a_run_that_resumes_inside_of_continuous_steps_profiles_the_rest():
    by_step = run([2, 3, 4], continuous=True, first=3)
    assert [step for step, (begun, _) in by_step.items() if begun] == [3]
    assert [step for step, (_, ended) in by_step.items() if ended] == [4]


class BrokenTrainer(ray_trainer.RayPPOTrainer):
    """A trainer whose third step does not come to its end."""

    def __init__(self, error, **groups):
        self.calls, self.error = [], error
        profiler = {"steps": [2, 3, 4], "profile_continuous_steps": True, "tool": "torch"}
        trainer = {
            "test_freq": -1,
            "val_before_train": False,
            "val_only": False,
            "project_name": "p",
            "experiment_name": "e",
        }
        trainer["timeline_steps"] = None
        node = {"global_profiler": profiler, "trainer": {**trainer, "record_digests": False, "record_samples": 0}}
        trace = {"backend": None, "token2text": False}
        node["actor_rollout_ref"] = {"rollout": {"skip_rollout": False, "trace": trace}}
        node["algorithm"] = {"rollout_is_threshold": None}
        self.config = OmegaConf.create(node)
        self.run_config = RunConfig.parse(self.config)
        self.state = RunState(seed=1, total_steps=5)
        self.tokenizer = None
        self.train_dataloader = self.kl_ctrl_in_reward = None
        self.ref_in_actor = False
        groups = {"ref_policy": {}, "critic": {}, "rm": {}, **groups}
        self.actor_rollout_wg = Group("actor_rollout", self.calls, **groups.pop("actor_rollout", {}))
        for name, options in groups.items():
            setattr(self, f"{name}_wg", Group(name, self.calls, **options))

    def _load_checkpoint(self):
        return None

    def collect(self, rows, metrics, timing):
        if self.global_steps == 3:
            raise self.error
        return DataProto()

    def _checked(self, name, batch, method, *args):
        return batch

    def _training_rows(self):
        return itertools.repeat({})

    def _dump(self, batch, timing):
        pass

    def _finish_step(self, batch, metrics, timing):
        pass


@pytest.fixture
def outputs(monkeypatch):
    """The trainer writes nothing; returns what has been stopped when the outputs are closed."""
    closed = []

    class Output:
        tracking = SimpleNamespace(logger={})
        folder = Path("no such folder")
        kept_step = None

        def __init__(self, *arguments):
            pass

        def log(self, metrics, step):
            pass

        def close(self, finished, report=True):
            closed.append(finished)

    monkeypatch.setattr(run_records, "RunOutput", Output)
    return closed


GROUPS = ["actor_rollout", "ref_policy", "critic", "rm"]


def stopped(trainer):
    return [name for name, call, *_ in trainer.calls if call == "stop"]


@pytest.mark.parametrize("error", [EndOfDataError("gone through"), KeyError("a scorer's"), KeyboardInterrupt()])
def test_a_capture_that_is_open_when_the_run_ends_is_stopped(error, outputs):
    trainer = BrokenTrainer(error)
    if isinstance(error, EndOfDataError):
        trainer.fit()
    else:
        with pytest.raises(type(error)):
            trainer.fit()
    assert [name for name, call, *_ in trainer.calls if call == "start"] == GROUPS == stopped(trainer)
    assert outputs == [isinstance(error, EndOfDataError)]
    assert trainer.actor_rollout_wg.call_timeout_s == 600.0  # workers that hang do not keep the run


def test_the_end_of_a_run_asks_no_dead_workers_and_tells_its_own_error(outputs, caplog):
    dead, full = {"ended": True}, {"fails": True}
    trainer = BrokenTrainer(KeyError("the first"), actor_rollout=dead, ref_policy=dead, critic=full)
    with pytest.raises(KeyError, match="the first"):
        trainer.fit()
    assert stopped(trainer) == ["critic", "rm"] and "could not be written" in caplog.text


def test_every_group_is_started_and_stopped():
    others = ["critic", "ref", "rm"]
    started, stopped = run([1], groups=others)[1]
    assert started[0] == ("actor_rollout", "start", {"role": "e2e", "profile_step": "1"})
    assert started[1:] == [(name, "start", {"profile_step": "1"}) for name in others]
    assert stopped == [(name, "stop") for name in ["actor_rollout", *others]]


@pytest.mark.parametrize(
    ("tool", "steps", "dumped"),
    [("torch", None, False), ("torch_memory", None, True), ("torch_memory", [2], True), ("torch_memory", [1], False)],
)
def test_snapshots_after_a_step(tool, steps, dumped):
    calls = []
    dump_memory(tool, steps, 2, Group("actor_rollout", calls))
    assert calls == [("actor_rollout", "dump", {"tag": "post_update_step2", "sub_dir": "step2"})] * dumped


def test_steps_that_never_come(caplog):
    with pytest.raises(ConfigError, match=r"global_profiler\.steps=\[2,9\]: steps \[9\] are after the last step, 8"):
        check_steps([2, 9], total_steps=8)
    with caplog.at_level(logging.WARNING):
        check_steps([2, 9], total_steps=9, resumed_step=2)
    assert "[2] are not profiled, the run resumes after step 2" in caplog.text
    check_steps(None, total_steps=1)


def test_workers_write_where_the_driver_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roles = {"actor": {"profiler": {"save_path": "out"}}, "rollout": {"profiler": {"save_path": "/abs"}}, "ref": {}}
    config = OmegaConf.create({"global_profiler": {"save_path": "~/x"}, "actor_rollout_ref": roles})
    absolute_save_paths(config)
    assert config.actor_rollout_ref.actor.profiler.save_path == str(tmp_path / "out")
    assert config.actor_rollout_ref.rollout.profiler.save_path == "/abs"
    assert config.global_profiler.save_path.startswith("/")
    config.global_profiler.save_path = None
    absolute_save_paths(config)
    assert config.global_profiler.save_path == str(tmp_path / "outputs" / "profile")
