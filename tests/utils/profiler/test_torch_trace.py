"""Chrome traces of ``torch.profiler``: the files and their content."""

import gc
import json
import logging

import pytest
import torch
from torch.profiler import ProfilerAction

from tests import chrome_trace
from verl.base_config import ConfigError
from verl.utils.profiler import DistProfiler, ProfilerConfig
from verl.utils.profiler.config import TorchProfilerToolConfig
from verl.utils.profiler.profile import RoleProfilers
from verl.utils.profiler.ranges import captured_range
from verl.utils.profiler.torch_trace import schedule_of


class Worker:
    """A worker of real matrix products, with an update of some mini-batches."""

    def __init__(self, profiler):
        self.profiler = profiler
        self.weight = torch.ones(8, 8)

    @DistProfiler.annotate(role="actor_compute_log_prob")
    def compute_log_prob(self):
        return torch.mm(self.weight, self.weight)

    @DistProfiler.annotate(role="actor_whole")
    def task_in_a_task(self):
        return self.compute_log_prob()

    @DistProfiler.annotate(role="actor_update", mini_batches=True)
    def update(self, mini_batches=3):
        for number in range(mini_batches):
            with captured_range(f"mini_batch {number}"):
                torch.addmm(self.weight, self.weight, self.weight)
            self.profiler.step()

    @DistProfiler.annotate(role="rollout_generate")
    def generate(self):
        return torch.softmax(self.weight, -1)


def worker_on(rank, folder, actor=None, rollout=None, **limits):
    configs = {"actor": actor or {}, "rollout": rollout or {}}
    profilers = {
        role: DistProfiler(
            rank,
            ProfilerConfig(
                tool="torch", save_path=str(folder), tool_config={"torch": TorchProfilerToolConfig(**limits)}, **options
            ),
            role=role,
        )
        for role, options in configs.items()
    }
    return Worker(RoleProfilers(profilers))


def step(worker, number, mini_batches=3):
    if number is not None:
        worker.profiler.start(role="e2e", profile_step=str(number))
    worker.generate()
    worker.compute_log_prob()
    worker.update(mini_batches)
    if number is not None:
        worker.profiler.stop()


def traces(folder):
    return {
        str(path.relative_to(folder)): json.loads(path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ranges(trace):
    marked = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(marked, key=lambda event: event["ts"])]


def operators(trace):
    return {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}


def test_one_trace_per_role_rank_and_step(tmp_path):
    for rank in range(3):
        worker = worker_on(rank, tmp_path, actor={"enable": True, "ranks": [0, 2]}, rollout={"enable": True})
        for number in (None, 1, 2, None):
            step(worker, number)
    found = traces(tmp_path)
    actor = [f"step{number}/actor/prof_start_0_end_last_rank_{rank}.json" for number in (1, 2) for rank in (0, 2)]
    rollout = [f"step{number}/rollout/prof_start_0_end_last_rank_0.json" for number in (1, 2)]
    assert sorted(found) == sorted(actor + rollout)
    for name in actor:
        assert ranges(found[name]) == ["actor_compute_log_prob", "actor_update", *(f"mini_batch {i}" for i in range(3))]
        assert {"aten::mm", "aten::addmm"} <= operators(found[name])
        assert "aten::softmax" not in operators(found[name])
    for name in rollout:
        assert ranges(found[name]) == ["rollout_generate"]
        assert "aten::softmax" in operators(found[name]) and "aten::addmm" not in operators(found[name])


def test_events_are_complete_and_on_one_clock(tmp_path):
    worker = worker_on(0, tmp_path, actor={"enable": True})
    step(worker, 1)
    (trace,) = traces(tmp_path).values()
    assert chrome_trace.faults(trace) == []
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) > 10
    assert all(event["dur"] >= 0 and {"name", "pid", "tid", "ts"} <= event.keys() for event in complete)
    by_name = {event["name"]: event for event in complete}
    log_prob, update, inner = (by_name[name] for name in ("actor_compute_log_prob", "actor_update", "mini_batch 2"))
    assert log_prob["ts"] + log_prob["dur"] <= update["ts"]
    assert update["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= update["ts"] + update["dur"]
    assert update["ts"] - log_prob["ts"] < 60e6  # microseconds


@pytest.mark.parametrize(
    ("limits", "file", "seen"),
    [
        ({"step_start": 1, "step_end": 3}, "prof_start_1_end_3_rank_0.json", [1, 2]),
        ({"step_start": 2}, "prof_start_2_end_last_rank_0.json", [2, 3]),
        ({"step_end": 1}, "prof_start_0_end_1_rank_0.json", [0]),
    ],
)
def test_only_some_mini_batches(tmp_path, limits, file, seen):
    worker = worker_on(0, tmp_path, actor={"enable": True}, **limits)
    step(worker, 1, mini_batches=4)
    found = traces(tmp_path)
    assert list(found) == [f"step1/actor/{file}"]
    trace = found[f"step1/actor/{file}"]
    assert ranges(trace) == ["actor_compute_log_prob", "actor_update", *(f"mini_batch {number}" for number in seen)]
    assert chrome_trace.faults(trace) == []  # among them ranges that overlap and do not nest


@pytest.mark.parametrize(
    ("limits", "first", "seen"),
    [
        ({"active": 1}, 0, range(8)),
        ({"active": 2, "wait": 1}, 1, [1, 2, 4, 5, 7]),
        ({"active": 1, "wait": 1, "warmup": 1}, 2, [2, 5]),
        ({"active": 1, "warmup": 1, "repeat": 2}, 1, [1, 3]),
        ({"active": 3, "skip_first": 2, "repeat": 1}, 2, [2, 3, 4]),
        ({"active": 9, "skip_first": 6}, 6, [6, 7]),
    ],
)
def test_cycles_of_mini_batches(tmp_path, limits, first, seen):
    """Those that torch's own loop over its schedule records too, apart from a last one without a mini-batch."""
    worker = worker_on(0, tmp_path, actor={"enable": True}, **limits)
    step(worker, 1, mini_batches=8)
    ((file, trace),) = traces(tmp_path).items()
    assert file == f"step1/actor/prof_first_{first}_active_{limits['active']}_rank_0.json"
    assert [name for name in ranges(trace) if name.startswith("mini")] == [f"mini_batch {number}" for number in seen]
    assert chrome_trace.faults(trace) == []
    chosen = schedule_of(TorchProfilerToolConfig(**limits))
    is_recorded = {ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE}
    assert [at for at in range(8) if chosen(at) in is_recorded] == list(seen)


def test_a_trace_for_each_task(tmp_path):
    worker = worker_on(0, tmp_path, actor={"enable": True}, discrete=True)
    worker.profiler.start(profile_step="1")
    worker.compute_log_prob()
    worker.update(1)
    worker.update(2)
    worker.profiler.stop()
    name = "prof_start_0_end_last_rank_0.json"
    tasks = {"actor_compute_log_prob_0": 0, "actor_update_0": 1, "actor_update_1": 2}
    found = traces(tmp_path)
    assert sorted(found) == [f"step1/actor/{task}_{name}" for task in sorted(tasks)]
    for task, mini_batches in tasks.items():
        expected = [task.rpartition("_")[0], *(f"mini_batch {number}" for number in range(mini_batches))]
        assert ranges(found[f"step1/actor/{task}_{name}"]) == expected


@pytest.mark.parametrize(
    ("contents", "seen"),
    [([], {"Input Dims"}), (["cpu"], set()), (["shapes"], {"Input Dims"}), (["memory"], {"Bytes"})],
)
def test_contents(tmp_path, contents, seen):
    worker = worker_on(0, tmp_path, actor={"enable": True}, contents=contents)
    step(worker, 1)
    (trace,) = traces(tmp_path).values()
    found = {name for event in trace["traceEvents"] for name in event.get("args", {})}
    assert {"Input Dims", "Bytes"} & found == seen
    assert "aten::mm" in operators(trace)


def test_python_stacks_are_refused():
    with pytest.raises(ConfigError, match="contents=.cpu,stack.: must be without stack"):
        TorchProfilerToolConfig(contents=["cpu", "stack"])


def test_mini_batches_that_never_come_are_told(tmp_path, caplog):
    worker = worker_on(0, tmp_path, actor={"enable": True}, step_start=5)
    with caplog.at_level(logging.WARNING):
        step(worker, 1)
    assert "first mini-batch 5: no trace, because actor_update had only 3 mini-batches" in caplog.text
    (trace,) = traces(tmp_path).values()
    assert ranges(trace) == ["actor_compute_log_prob"]


def test_a_full_disk_costs_a_trace_and_no_more(tmp_path, caplog):
    """torch's writer reports no error; here its file is a link to ``/dev/full``."""
    worker = worker_on(0, tmp_path, actor={"enable": True})
    folder = tmp_path / "step1" / "actor"
    folder.mkdir(parents=True)
    (folder / "prof_start_0_end_last_rank_0.json.part1.tmp").symlink_to("/dev/full")
    step(worker, 1)
    assert "the profile of actor could not be written" in caplog.text and "free space on the disk" in caplog.text
    assert list(folder.iterdir()) == []
    step(worker, 2)
    assert list(traces(tmp_path)) == ["step2/actor/prof_start_0_end_last_rank_0.json"]


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"profiler\.save_path=.*/file/x cannot be created: Not a directory"):
        worker_on(0, tmp_path / "file" / "x", actor={"enable": True})
    worker_on(1, tmp_path / "file" / "x", actor={"enable": True})  # of a rank that is not profiled


def test_a_step_leaves_no_recorder_behind(tmp_path):
    """Each is a reference cycle and holds many times the size of its trace."""
    worker = worker_on(0, tmp_path, actor={"enable": True})
    gc.collect()
    gc.disable()
    try:
        step(worker, 1)
        assert [each for each in gc.get_objects() if type(each) is torch.profiler.profile] == []
    finally:
        gc.enable()


def test_a_step_without_a_task_and_one_that_fails(tmp_path):
    worker = worker_on(0, tmp_path, actor={"enable": True})
    worker.profiler.start(profile_step="1")
    worker.profiler.stop()
    assert traces(tmp_path) == {}
    worker.profiler.start(profile_step="2")
    worker.task_in_a_task()
    worker.weight = None
    with pytest.raises(TypeError):
        worker.compute_log_prob()
    (trace,) = traces(tmp_path).values()  # written then: the driver ends a worker that has failed
    worker.profiler.stop()
    assert ranges(trace) == ["actor_whole", "actor_compute_log_prob", "actor_compute_log_prob"]


def test_what_a_viewer_would_not_load_is_found():
    slices = [{"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 5.0 * i, "dur": 4.0} for i in range(3)]
    inner = {"name": "b", "ph": "X", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    meta = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "x"}}
    flow = [{"name": "f", "ph": kind, "id": 1, "cat": "c", "pid": 1, "tid": 1, "ts": 1.0} for kind in "sf"]
    sound = [*slices, inner, meta, *flow]
    assert chrome_trace.faults({"traceEvents": sound}) == []
    assert chrome_trace.faults([]) and chrome_trace.faults({})
    damaged = [
        inner | {"dur": 4.5}, inner | {"dur": -1.0}, inner | {"ts": "1"}, inner | {"ph": "?"}, inner | {"name": None},
        meta | {"args": None}, flow[0] | {"id": 2}, {"ph": "X", "name": "c", "ts": 1.0, "dur": 1.0},
    ]  # fmt: skip
    for event in damaged:
        assert len(chrome_trace.faults({"traceEvents": [*slices, *flow, event]})) == 1, event
