"""Checkpoints that are either complete or absent, never half-written."""

from verl.utils.checkpoint.files import (
    CheckpointError,
    find_complete_checkpoints,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
    verify_checkpoint,
    write_tracker_atomically,
)

__all__ = [
    "CheckpointError",
    "find_complete_checkpoints",
    "find_latest_ckpt_path",
    "get_checkpoint_tracker_filename",
    "should_save_ckpt_esi",
    "verify_checkpoint",
    "write_tracker_atomically",
]
