"""A profiler that writes its options and the ranges as one JSON file."""

import enum
import itertools
import json
import os
import socket
from pathlib import Path

from torch_npu.npu import mstx

ProfilerLevel = enum.Enum("ProfilerLevel", "Level_none Level0 Level1 Level2")
ProfilerActivity = enum.Enum("ProfilerActivity", "CPU NPU")
ExportType = enum.Enum("ExportType", "Text Db")
_captures = itertools.count(1)
_running = []


class _ExperimentalConfig:
    def __init__(
        self, profiler_level=ProfilerLevel.Level0, export_type=None, data_simplification=True, msprof_tx=False
    ):
        self.level = profiler_level
        self.msprof_tx = msprof_tx


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, async_mode=False):
    name = worker_name or f"{socket.gethostname()}_{os.getpid()}"
    return Path(dir_name, f"{name}_{next(_captures)}_ascend_pt")


class profile:  # the name of torch_npu
    def __init__(
        self, *, activities=None, schedule=None, on_trace_ready=None, record_shapes=False, profile_memory=False,
        with_stack=False, with_modules=False, with_flops=False, experimental_config=None,
    ):  # fmt: skip
        self.folder = on_trace_ready
        self.config = experimental_config
        self.steps = 0
        self.activities = [activity.name for activity in activities]

    def start(self):
        assert not _running, "torch_npu profiles a process once at a time"
        _running.append(self)
        self.first = len(mstx.events)

    def step(self):
        self.steps += 1

    def stop(self):
        _running.remove(self)
        ranges = mstx.events[self.first :] if self.config.msprof_tx else []
        found = {"activities": self.activities, "level": self.config.level.name, "steps": self.steps, "ranges": ranges}
        self.folder.mkdir(parents=True)
        (self.folder / "trace.json").write_text(json.dumps(found | {"rank": os.environ.get("RANK")}))
