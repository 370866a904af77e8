"""Checkpoints that are either complete or absent, never half-written."""

from verl.utils.checkpoint.files import find_complete_checkpoints as find_complete_checkpoints
from verl.utils.checkpoint.files import find_latest_ckpt_path as find_latest_ckpt_path
from verl.utils.checkpoint.files import get_checkpoint_tracker_filename as get_checkpoint_tracker_filename
from verl.utils.checkpoint.files import should_save_ckpt_esi as should_save_ckpt_esi
from verl.utils.checkpoint.files import verify_checkpoint as verify_checkpoint
from verl.utils.checkpoint.files import write_tracker_atomically as write_tracker_atomically
