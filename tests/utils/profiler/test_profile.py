"""Which ranks are profiled and when, and the cost of a call without profiling."""

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from verl.single_controller.base.decorator import Dispatch
from verl.single_controller.base.worker_group import registered_methods
from verl.utils.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig, profile
from verl.utils.profiler.config import NsightToolConfig, TorchProfilerToolConfig
from verl.utils.profiler.profile import RoleProfilers, tool_config_of
from verl.utils.profiler.ranges import captured_range


class RecordingTool:
    """A tool that records its calls."""

    def __init__(self, calls):
        self.calls = calls

    def start(self, **kwargs):
        self.calls.append(("start", kwargs))

    def stop(self):
        self.calls.append(("stop",))

    @contextmanager
    def task(self, name, role, **options):
        self.calls.append(("task", name, role, options.get("mini_batches", False)))
        try:
            yield
        finally:
            self.calls.append(("end", name))

    @contextmanager
    def range(self, name):
        self.calls.append(("range", name))
        yield

    def step(self):
        self.calls.append(("step",))


class Worker(DistProfilerExtension):
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update(self, value, fails=False):
        with captured_range("part"):
            self.profiler.step()
        if fails:
            raise KeyError("wrong")
        return value + 1

    @DistProfiler.annotate(message="greeting")
    async def greet(self, name):
        return f"hello {name}"

    @DistProfiler.annotate(role="rollout_generate")
    def generate(self):
        return captured_range("outside of a capture")


@pytest.fixture
def calls(monkeypatch):
    recorded = []
    for tool in profile.OF_TOOL:
        monkeypatch.setitem(profile.OF_TOOL, tool, lambda *args: RecordingTool(recorded))
    return recorded


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"tool": "torch"}, []),
        ({"tool": "torch", "enable": True}, [0]),
        ({"tool": "torch_memory", "enable": True}, [0]),
        ({"tool": "torch", "enable": True, "ranks": [1, 3]}, [1, 3]),
        ({"tool": "torch", "enable": True, "ranks": [1], "all_ranks": True}, [0, 1, 2, 3]),
        ({"tool": "torch", "all_ranks": True, "ranks": [0]}, []),
        ({"tool": "nsys", "enable": True}, []),
        ({"tool": "npu", "enable": True}, []),
        ({"tool": "nsys", "enable": True, "ranks": [2]}, [2]),
        ({"tool": None, "enable": True, "all_ranks": True}, []),
    ],
)
def test_which_ranks_are_profiled(options, ranks, calls):
    profilers = [DistProfiler(rank, ProfilerConfig(**options)) for rank in range(4)]
    for profiler in profilers:
        profiler.start(profile_step="1")
    assert [profiler.rank for profiler in profilers if profiler.running] == ranks
    assert len(calls) == len(ranks)


def test_a_task_is_captured_between_start_and_stop_only(calls):
    worker = Worker(DistProfiler(0, ProfilerConfig(tool="torch", enable=True)))
    assert worker.update(1) == 2
    worker.start_profile(role="e2e", profile_step="3")
    worker.start_profile(role="e2e", profile_step="3")  # a second start changes nothing
    assert worker.update(2) == 3
    assert asyncio.run(worker.greet("you")) == "hello you"
    worker.stop_profile()
    assert worker.update(3) == 4
    update = [("task", "actor_update", "actor_update", True), ("range", "part"), ("step",), ("end", "actor_update")]
    assert calls == [
        ("start", {"role": "e2e", "profile_step": "3"}),
        *update,
        ("task", "greeting", "greet", False),
        ("end", "greeting"),
        ("stop",),
    ]


def test_unknown_keywords_of_a_task_and_of_a_start_are_accepted(calls):
    worker = Worker(RoleProfilers({"actor": DistProfiler(0, ProfilerConfig(tool="torch", enable=True))}))
    worker.start_profile(profile_step="1", reason="slow")
    assert DistProfiler.annotate(mini_batches=True, shade=3)(Worker.generate)(worker) is not None
    worker.stop_profile()
    assert calls[0] == ("start", {"role": None, "profile_step": "1"}) and ("end", "generate") in calls


def test_a_combination_is_of_ranks_and_holds_no_steps():
    first = ProfilerConfig(tool="torch", enable=True, ranks=[2, 0], save_path="here", steps=[1])
    second = ProfilerConfig(tool="torch", ranks=[1, 2], profile_continuous_steps=True)
    both = ProfilerConfig(tool="torch", enable=True, ranks=[0, 1, 2], save_path="here")
    assert (first.union(second), first.intersect(second)) == (both, replace(both, enable=False, ranks=[2]))


def test_a_task_that_fails_ends_the_step_in_all_roles_of_its_process(calls, caplog):
    on = ProfilerConfig(tool="torch", enable=True)
    worker = Worker(RoleProfilers({role: DistProfiler(0, on, role=role) for role in ("actor", "rollout")}))
    other, late = Worker(DistProfiler(0, on, role="critic")), Worker(DistProfiler(0, on, role="ref"))
    for each in (worker, other, late):
        each.start_profile(profile_step="1")
    late.stop_profile()
    calls.clear()
    with pytest.raises(KeyError, match="wrong"):
        worker.update(2, fails=True)
    ends = [("task", "actor_update", "actor_update", True), ("range", "part"), ("step",), ("end", "actor_update")]
    assert calls == [*ends, ("stop",), ("stop",), ("stop",)]
    calls.clear()
    assert worker.update(1) == 2 and other.update(1) == 2
    worker.stop_profile(), other.stop_profile()
    assert calls == []


def test_an_error_of_a_task_is_told_where_its_capture_cannot_be_written(monkeypatch, caplog):
    class FullDisk(RecordingTool):
        def stop(self):
            raise OSError("no room")

    monkeypatch.setitem(profile.OF_TOOL, "torch", lambda *args: FullDisk([]))
    worker = Worker(DistProfiler(0, ProfilerConfig(tool="torch", enable=True), role="actor"))
    worker.start_profile(profile_step="1")
    with pytest.raises(KeyError, match="wrong"):
        worker.update(2, fails=True)
    assert "the profile of actor could not be written: no room" in caplog.text


def test_a_task_belongs_to_the_role_that_its_name_begins_with(calls):
    actor, rollout = ProfilerConfig(tool="torch"), ProfilerConfig(tool="torch", enable=True)
    worker = Worker(RoleProfilers({"actor": DistProfiler(0, actor), "rollout": DistProfiler(0, rollout)}))
    worker.start_profile(profile_step="1")
    worker.update(1)
    worker.generate()
    worker.stop_profile()
    tasks = [name for kind, name, *_ in calls[1:-1] if kind == "task"]
    assert tasks == ["rollout_generate"]


def test_the_rpcs_are_registered_for_all_workers():
    of_results = {"profile_files", "read_profile_files", "run_profile_command"}
    assert registered_methods(Worker).keys() == {"start_profile", "stop_profile", *of_results}
    assert {attrs["dispatch_mode"] for attrs in registered_methods(Worker).values()} == {Dispatch.ONE_TO_ALL}
    assert Worker.update.__name__ == "update"
    Worker().start_profile(profile_step="1")  # nothing to profile with


def test_options_of_the_tool_are_found():
    torch_node = {"_target_": "verl.utils.profiler.config.TorchProfilerToolConfig", "step_start": 2}
    config = ProfilerConfig(tool="torch", tool_config={"nsys": NsightToolConfig(), "torch": torch_node})
    assert tool_config_of(config) == TorchProfilerToolConfig(step_start=2)
    own = TorchProfilerToolConfig(step_end=4)
    assert tool_config_of(ProfilerConfig(tool="torch", tool_config={"torch": own})) is own
    assert tool_config_of(ProfilerConfig(tool="torch", tool_config=own)) is own
    assert tool_config_of(ProfilerConfig(tool="nsys")) == NsightToolConfig()


def test_a_disabled_profiler_builds_no_tool_and_opens_no_range(calls):
    worker = Worker(RoleProfilers({"actor": DistProfiler(0, ProfilerConfig(tool="torch"))}))
    worker.start_profile(profile_step="1")
    assert worker.update(1) == 2
    assert worker.generate() is captured_range("another")  # one and the same context, which does nothing
    worker.stop_profile()
    assert calls == []


@pytest.mark.full
def test_a_disabled_profiler_costs_next_to_nothing():
    """The bound leaves room for a busy machine; ``docs/perf/profiling.md`` has what was measured."""

    class Plain:
        profiler = RoleProfilers({"actor": DistProfiler(0, ProfilerConfig())})

        @DistProfiler.annotate(role="actor_update")
        def update(self):
            return None

    worker, count = Plain(), 2000
    best = min(_seconds(worker.update, count) for _ in range(5)) / count
    assert best < 20e-6


def _seconds(call, count):
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
