"""The tracker, folders of steps, and the announced end of the machine."""

import subprocess
import sys
import time

import pytest

from verl.errors import CheckpointError
from verl.utils.checkpoint import (
    files,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
    write_tracker_atomically,
)
from verl.utils.checkpoint.files import step_folders


def test_tracker(tmp_path):
    assert find_latest_ckpt_path(None) is None and find_latest_ckpt_path(tmp_path) is None
    write_tracker_atomically(tmp_path, 7)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert get_checkpoint_tracker_filename(str(tmp_path)) == str(tracker)
    assert tracker.read_text() == "7" and list(tmp_path.iterdir()) == [tracker]
    assert find_latest_ckpt_path(tmp_path) is None  # the folder is not there
    (tmp_path / "global_step_7").mkdir()
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_7")
    (tmp_path / "step-7").mkdir()
    assert find_latest_ckpt_path(tmp_path, "step-{}") == str(tmp_path / "step-7")
    tracker.write_text("seven")
    with pytest.raises(CheckpointError, match="'seven' instead of a step"):
        find_latest_ckpt_path(tmp_path)


def test_folders_are_ordered_by_number(tmp_path):
    for name in ("global_step_10", "global_step_9", "global_step_x", "other_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_11").touch()
    assert [step for step, _ in step_folders(tmp_path)] == [9, 10]


@pytest.mark.parametrize("variable", ["MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
                                      "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"])  # fmt: skip
def test_early_save(variable, monkeypatch):
    assert not should_save_ckpt_esi(1000)
    for remaining, want in ((50, True), (150, True), (170, False)):
        monkeypatch.setenv(variable, str(time.time() + remaining))
        assert should_save_ckpt_esi(100) is want  # 60 s for the save, 100 s for another step
    assert should_save_ckpt_esi(100, redundant_time=20)


@pytest.mark.parametrize(
    ("announced", "duration", "warning"),
    [(-5, 100, "has passed"), ("tomorrow", 1, "'tomorrow' is no time"), ("nan", 1, "has passed"),
     (3600, 0, "no step has been timed")],
)  # fmt: skip
def test_no_early_save_without_a_usable_time(announced, duration, warning, monkeypatch, caplog):
    """A number is counted from now."""
    files._warn_once.cache_clear()
    value = announced if isinstance(announced, str) else str(time.time() + announced)
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", value)
    assert [should_save_ckpt_esi(duration) for _ in range(3)] == [False] * 3
    assert len([record for record in caplog.messages if warning in record]) == 1


def test_needs_no_torch():
    """The launching process looks for a checkpoint before it has loaded torch."""
    code = "import sys, verl.utils.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
