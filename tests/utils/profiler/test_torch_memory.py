"""Snapshots of the allocator: the calls to a fake torch.cuda, and the files."""

import logging
import os
import pickle

import pytest
import torch

from verl.utils import memory_utils
from verl.utils.profiler import DistProfiler, GPUMemoryLogger, ProfilerConfig, log_gpu_memory_usage, memory
from verl.utils.profiler.config import TorchMemoryToolConfig


@pytest.fixture
def recorder(monkeypatch):
    """Replace torch's recorder, which needs a device, by a fake."""
    calls = []
    frames = [{"name": f"frame{number}"} for number in range(40)]
    snapshot = {
        "segments": [{"blocks": [{"frames": list(frames)}], "frames": list(frames)}],
        "device_traces": [[{"action": "alloc", "frames": list(frames)}]],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(memory, "_recording", [])
    monkeypatch.setattr(memory, "_written", set())
    monkeypatch.setattr(memory_utils.MemorySnapshotSampler, "stack_depth", None)
    return calls


def profiler_on(rank, folder, **options):
    config = ProfilerConfig(
        tool="torch_memory",
        enable=True,
        save_path=str(folder),
        tool_config={"torch_memory": TorchMemoryToolConfig(**options)},
    )
    return DistProfiler(rank, config)


def test_options_reach_the_recorder_and_snapshots_their_place(recorder, tmp_path):
    options = {"trace_alloc_max_entries": 7, "stack_depth": 3, "context": "alloc", "stacks": "cpp"}
    profiler = profiler_on(0, tmp_path, **options, kw_args={"skip_actions": ["segment_map"]})
    other_role, other_rank = profiler_on(0, tmp_path), profiler_on(1, tmp_path)
    assert recorder == [
        {"enabled": "all", "context": "alloc", "stacks": "all", "max_entries": 7, "device": None,
         "skip_actions": ["segment_map"]}
    ]  # fmt: skip
    for each in (profiler, other_role, other_rank):
        each.start(profile_step="4")
        each.stop()
    file = tmp_path / "step4" / f"torch_memory_rank0_pid{os.getpid()}.pickle"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    snapshot = pickle.loads(file.read_bytes())
    kept = ["frame0", "frame1", "frame2"]
    assert [frame["name"] for frame in snapshot["device_traces"][0][0]["frames"]] == kept
    assert [frame["name"] for frame in snapshot["segments"][0]["blocks"][0]["frames"]] == kept

    assert profiler.dump_memory_snapshot("post_update_step4", "step4")
    assert (tmp_path / "step4" / f"post_update_step4_rank0_pid{os.getpid()}.pickle").exists()
    assert not other_rank.dump_memory_snapshot("x", None)


def test_a_full_disk_costs_a_snapshot_and_no_more(recorder, tmp_path, caplog):
    profiler = profiler_on(0, tmp_path)
    folder = tmp_path / "step1"
    folder.mkdir()
    for tag in ("torch_memory", "after"):
        (folder / f"{tag}_rank0_pid{os.getpid()}.pickle.part").symlink_to("/dev/full")
    profiler.start(profile_step="1")
    profiler.stop()
    assert profiler.dump_memory_snapshot("after", "step1")
    assert "the profile of e2e could not be written: [Errno 28]" in caplog.text
    assert "the memory snapshot after could not be written: [Errno 28]" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_snapshot_without_a_place_is_named_by_the_time(recorder, tmp_path):
    path = memory_utils.MemorySnapshotSampler(str(tmp_path), "mine").dump_memory_snapshot()
    assert path.startswith(f"{tmp_path}/2") and path.endswith(f"/mine_rank0_pid{os.getpid()}.pickle")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_message_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"no CUDA device: use global_profiler\.tool=torch instead"):
        profiler_on(0, tmp_path)


def test_memory_is_logged_around_a_call(caplog):
    @GPUMemoryLogger(role="actor", logger=logging.getLogger("memory"), level=logging.INFO)
    def work(value):
        return value + 1

    with caplog.at_level(logging.INFO):
        assert work(1) == 2
        log_gpu_memory_usage("quiet", logging.getLogger("memory"))  # DEBUG, which is off
    before, after = caplog.messages
    assert before.startswith("before actor work, memory in GiB: ") and after.startswith("after actor work")
    assert memory_utils.get_memory_info()["rss_gb"] > 0.05
    memory_utils.reset_memory_stats()
    memory_utils.aggressive_empty_cache()
