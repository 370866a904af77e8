"""Profiling on Ascend devices makes the right calls to a fake torch_npu."""

import enum
import sys
import types

import pytest

from verl.utils.profiler import DistProfiler, ProfilerConfig, ranges
from verl.utils.profiler.config import NPUToolConfig


@pytest.fixture
def events(monkeypatch):
    """Replace torch_npu by a fake module with the documented part of its interface."""
    seen = []
    profiler = types.ModuleType("torch_npu.profiler")
    profiler.ProfilerLevel = enum.Enum("ProfilerLevel", "Level_none Level0 Level1 Level2")
    profiler.ProfilerActivity = enum.Enum("ProfilerActivity", "CPU NPU")
    profiler.ExportType = enum.Enum("ExportType", "Text Db")
    profiler._ExperimentalConfig = lambda **options: options
    profiler.tensorboard_trace_handler = lambda dir_name, worker_name=None, analyse_flag=True: (dir_name, analyse_flag)

    class profile:
        def __init__(
            self, *, activities, record_shapes, profile_memory, with_modules, with_stack, on_trace_ready,
            experimental_config
        ):  # fmt: skip
            self.folder, analyse = on_trace_ready
            flags = [record_shapes, profile_memory, with_modules, with_stack, analyse]
            seen.append(("profile", [a.name for a in activities], flags, experimental_config["profiler_level"].name))

        def start(self):
            seen.append(("start", self.folder))

        def step(self):
            seen.append(("step", self.folder))

        def stop(self):
            seen.append(("stop", self.folder))

    profiler.profile = profile
    mstx = types.SimpleNamespace(
        range_start=lambda message: seen.append(("range_start", message)) or 7,
        range_end=lambda range_id: seen.append(("range_end", range_id)),
    )
    torch_npu, npu = types.ModuleType("torch_npu"), types.ModuleType("torch_npu.npu")
    torch_npu.profiler, torch_npu.npu, npu.mstx = profiler, npu, mstx
    for name, module in (("torch_npu", torch_npu), ("torch_npu.profiler", profiler), ("torch_npu.npu", npu)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("verl.utils.device.is_npu_available", True)
    monkeypatch.setattr(ranges, "marks", ranges.marks.__wrapped__)  # without the answer for this machine
    return seen


class Worker:
    def __init__(self, profiler):
        self.profiler = profiler

    @DistProfiler.annotate(color="red", role="actor_update")
    def update(self):
        return None


def worker_with(folder, **options):
    config = ProfilerConfig(
        tool="npu", enable=True, all_ranks=True, save_path=str(folder), tool_config={"npu": NPUToolConfig(**options)}
    )
    return Worker(DistProfiler(0, config, role="actor"))


RANGE = [("range_start", "actor_update"), ("range_end", 7)]


def test_a_trace_of_a_step_and_of_each_task(events, tmp_path):
    worker = worker_with(tmp_path)
    worker.profiler.start(role="e2e", profile_step="2")
    worker.update()
    worker.profiler.stop()
    folder = str(tmp_path / "step2" / "e2e")
    assert events == [
        *(("profile", ["NPU", "CPU"], [False, False, False, False, True], "Level1"), ("start", folder)),
        *(*RANGE, ("step", folder), ("stop", folder)),
    ]
    del events[:]
    worker = worker_with(tmp_path, discrete=True)
    worker.profiler.start(role="e2e", profile_step="2")
    worker.update()
    worker.profiler.stop()
    folder = str(tmp_path / "step2" / "actor_update")
    assert events[1:] == [("start", folder), *RANGE, ("step", folder), ("stop", folder)]


def test_roles_of_one_process_share_a_trace(events, tmp_path):
    first, second = worker_with(tmp_path), worker_with(tmp_path)
    first.profiler.start(role="e2e", profile_step="1")
    second.profiler.start(profile_step="1")
    first.profiler.stop()
    second.profiler.stop()
    assert [event[0] for event in events] == ["profile", "start", "step", "stop"]


@pytest.mark.parametrize(
    ("options", "activities", "flags", "level"),
    [
        ({"contents": ["cpu", "shapes"], "level": "level0"}, ["CPU"], [True, False, False, False, True], "Level0"),
        (
            {"contents": ["npu", "memory", "module", "stack"], "level": "level_none", "analysis": False},
            ["NPU"],
            [False, True, True, True, False],
            "Level_none",
        ),
    ],
)
def test_options_reach_the_profiler_of_torch_npu(events, tmp_path, options, activities, flags, level):
    worker = worker_with(tmp_path, **options)
    worker.profiler.start(profile_step="1")
    worker.profiler.stop()
    assert events[0] == ("profile", activities, flags, level)
