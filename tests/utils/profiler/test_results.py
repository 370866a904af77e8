"""What follows the last profiled step: files are gathered, and the command of the user runs."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from verl.single_controller.base.worker import DistProfilerExtension
from verl.trainer.ppo.profiling import finish_profiling
from verl.trainer.ppo.state import RunState
from verl.utils.profiler import ProfilerConfig


class Node(DistProfilerExtension):
    """A worker of a node whose folder of profiles is on a disk of its own."""

    def __init__(self, rank: int, disk: Path) -> None:
        super().__init__()
        self.rank, self.disk = rank, disk

    def profile_files(self, folder: str) -> dict[str, int]:
        return super().profile_files(str(self.disk))

    def read_profile_files(self, folder: str, names: dict[int, list[str]]) -> dict[str, bytes]:
        return super().read_profile_files(str(self.disk), names)


class Group:
    """Workers that are called all at once."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __getattr__(self, verb: str) -> Any:
        return lambda *args: [getattr(node, verb)(*args) for node in self.nodes]


def finish(folder: Path, nodes: list[Node], step: int = 2, **options: Any) -> None:
    profiler = ProfilerConfig(steps=[1, 2, 9], save_path=str(folder), **options)
    state = RunState(seed=1, total_steps=5)
    state.step = step
    groups: Any = {"actor_rollout": Group(nodes)}
    finish_profiling(profiler, state, groups)


def test_what_follows_the_last_profiled_step(tmp_path: Path) -> None:
    """Files that the trainer's node has, or that an earlier run has left, are not moved. Step 9 is never reached."""
    disks = [tmp_path / name for name in ("here", "there", "there")]
    for disk, names in zip(disks[:2], (["step1/actor/rank_0.json"], ["step1/actor/rank_1.json", "old"]), strict=True):
        for name in names:
            (disk / name).parent.mkdir(parents=True, exist_ok=True)
            (disk / name).write_text(f"{disk.name} {name}")
    os.utime(disks[1] / "old", (0, 0))
    nodes = [Node(rank, disk) for rank, disk in enumerate(disks)]
    folder, command = disks[0], "echo $VERL_PROFILE_RANK $(ls step1/actor) >hook_$VERL_PROFILE_RANK"
    options = {"relocate_results": True, "finish_hook_cmd": command}

    def files() -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}

    before = files()
    finish(folder, nodes, step=1, **options)
    finish(folder, nodes)
    assert files() == before
    finish(folder, nodes, **options)
    traces = {f"step1/actor/rank_{rank}.json" for rank in (0, 1)}
    assert files().keys() == {*traces, "hook_0"}
    assert files()["hook_0"] == "0 rank_0.json rank_1.json\n"
    assert files()["step1/actor/rank_1.json"] == "there step1/actor/rank_1.json"
    finish(folder, nodes, finish_hook_cmd=command, finish_hook_ranks=[2])
    assert files().keys() == {*traces, "hook_0", "hook_2"}
    finish(folder, nodes, finish_hook_cmd=command, finish_hook_all_ranks=True)
    assert files().keys() == {*traces, "hook_0", "hook_1", "hook_2"}


def test_a_command_that_fails_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(tmp_path, [Node(0, tmp_path)], finish_hook_cmd="echo no such bucket >&2; exit 3")
    told = "finish_hook_cmd ended with 3 on rank 0, and the run continues: no such bucket"
    assert told in caplog.text


def test_files_that_cannot_be_kept_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "trace").write_text("new")
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        finish(tmp_path / "file", [Node(0, tmp_path / "there")], relocate_results=True)
    assert "profiles of other nodes could not be gathered" in caplog.text
