"""Checkpoints of a supervised run: the engine's files and the position of the data loader."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl.errors import CheckpointError
from verl.trainer.run.resume import (
    ANOTHER,
    MISSING_DATA,
    damaged_checkpoint,
    name_start,
    refuse_unnamed,
    restoring,
    step_of,
    tell_removed,
)
from verl.utils import hdfs_io
from verl.utils.checkpoint import files
from verl.utils.checkpoint.removal import SaveMark, remove_leftovers
from verl.utils.dataset.factory import digest_of, warn_of_other_batch_size, warn_of_other_data
from verl.utils.json_types import Json
from verl.utils.loading import State, load_state

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.workers.engine import BaseEngine

logger = logging.getLogger(__name__)

RUN_STATE_NAME = "run_state.json"
TOKENS_KEY = "total_tokens"
_DIGEST_KEY = "data_digest"
_BATCH_KEY = "train_batch_size"
_RANKS_KEY = "data_parallel_size"
_STEP_KEY = "step"
_LOADER_KEY = "dataloader"


@dataclass
class CheckpointHandler:
    """Write ``<default_local_dir>/global_step_<N>/`` and resume from it.

    Args:
        engine: writes its own files; collective.
        train_dataloader: its state is saved as ``data_<dp_rank>.pt``. A run with another number of data-parallel ranks
            than the checkpoint's continues at the same row.
        default_local_dir: root of the checkpoints.
        max_ckpt_to_keep: number of checkpoints to keep; None for all.
        default_hdfs_dir: finished checkpoints are copied there.
        resume_mode: ``auto`` resumes from ``resume_from_path`` if given, else from the latest; ``disable`` never does.
        resume_from_path: a folder ``global_step_<N>``.
        trusted_classes: classes that the state of the loader may hold.

    Attributes: ``run_state`` holds the counters of the run, restored from the checkpoint; ``restored_from`` is the file
        of the state that the loader takes when it is first read.
    """

    engine: "BaseEngine"
    train_dataloader: "StatefulDataLoader"
    _: KW_ONLY
    default_local_dir: str
    max_ckpt_to_keep: int | None = None
    default_hdfs_dir: str | None = None
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    trusted_classes: Sequence[str] = ()
    run_state: State = field(default_factory=dict, init=False)
    restored_from: Path | None = field(default=None, init=False)
    _unfinished: int | None = field(default=None, init=False)
    _mark: SaveMark | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.resume_from_path is not None:
            step_of(self.resume_from_path)
        self.default_local_dir = os.path.abspath(os.path.expanduser(self.default_local_dir))
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def save_checkpoint(self, step: int, run_state: Mapping[str, Json] | None = None) -> str:
        """Write a checkpoint, name it as the latest, and return its folder; collective.

        ``run_state`` holds the counters of the run, as JSON values. With an asynchronous save,
        ``finish_checkpoint`` names the checkpoint.
        """
        self.finish_checkpoint()
        folder = os.path.join(self.default_local_dir, f"{files.STEP_FOLDER}{step}")
        if self.rank == 0:
            self._mark = SaveMark(folder)
        self._barrier()
        if self.engine.is_mp_src_rank_with_outputs():
            state = {_STEP_KEY: step, _LOADER_KEY: self.train_dataloader.state_dict()}
            files.write_file(folder, self._loader_file(), lambda file: torch.save(state, file))
        if self.rank == 0:
            content = {
                **(run_state or {}),
                _STEP_KEY: step,
                _DIGEST_KEY: digest_of(self.train_dataloader.dataset),
                _BATCH_KEY: self._batch_size(),
                _RANKS_KEY: self.engine.get_data_parallel_size(),
            }
            files.write_text(folder, RUN_STATE_NAME, json.dumps(content))
        self._barrier()
        self.engine.save_checkpoint(local_path=folder, hdfs_path=None, global_step=step)
        self._unfinished = step
        self.finish_checkpoint(wait=False)
        return folder

    def finish_checkpoint(self, wait: bool = True) -> None:
        """Name the checkpoint in progress as the latest once it is complete; ``wait`` blocks until then. Collective."""
        step = self._unfinished
        if step is None or not self.engine.finish_checkpoint(wait):
            return
        self._unfinished = None
        folder = os.path.join(self.default_local_dir, f"{files.STEP_FOLDER}{step}")
        self._barrier()
        if self._mark is not None:
            self._mark.remove()
            files.write_tracker_atomically(self.default_local_dir, step)
            if self.default_hdfs_dir is not None:
                hdfs_io.put_folder(folder, os.path.join(self.default_hdfs_dir, os.path.basename(folder)))
                tracker = files.get_checkpoint_tracker_filename(self.default_local_dir)
                hdfs_io.copy(tracker, files.get_checkpoint_tracker_filename(self.default_hdfs_dir))
        self._barrier()
        self.engine.keep_latest_checkpoints(folder, self.max_ckpt_to_keep)
        if self.rank == 0:
            tell_removed(remove_leftovers(self.default_local_dir))

    def load_checkpoint(self) -> int:
        """Restore engine and loader, and return the step to continue from, 0 without a checkpoint; collective.

        Raises: WrongSetting when ``auto`` finds complete checkpoints and none that the tracker names;
            WrongInput when the folder has another name than at the save, CheckpointError when it
            does not exist, lacks the state of the loader, or is of an older version and another number of data-parallel
            ranks; UntrustedClassError when the state of the loader names classes that may run code.
        """
        folder = self._folder()
        step = 0 if folder is None else self._load(folder)
        if self.rank == 0:
            name_start(Path(self.default_local_dir), None if folder is None else Path(folder))
        return step

    def _load(self, folder: str) -> int:
        step = step_of(folder)
        if problem := files.renamed_problem(folder, folder):
            raise damaged_checkpoint(folder, [problem], ANOTHER)
        logger.warning("resuming from %s", folder)
        counted = Path(folder, RUN_STATE_NAME)
        if counted.exists():
            with restoring(counted):
                self.run_state = _counters(json.loads(counted.read_text(encoding="utf-8")))
            _check_step(counted, self.run_state, step)
        position = self._position(Path(folder), step)
        self.engine.load_checkpoint(folder)
        self.restored_from = Path(folder, self._loader_file(self.run_state.get(_RANKS_KEY, 0)))
        with restoring(self.restored_from):
            self.train_dataloader.load_state_dict(position)
        if self.run_state:
            warn_of_other_data(self.run_state.get(_DIGEST_KEY), self.train_dataloader.dataset)
            warn_of_other_batch_size(self.run_state.get(_BATCH_KEY), self._batch_size())
        else:
            logger.warning("%s is missing: counters of the run, such as tokens, start at 0", counted)
        return step

    def _folder(self) -> str | None:
        if self.resume_mode == "disable":
            return None
        if self.resume_from_path is None:
            latest = files.find_latest_ckpt_path(self.default_local_dir)
            if latest is None and self.rank == 0:  # a run on several nodes is not checked before
                refuse_unnamed(Path(self.default_local_dir))
            return latest
        folder = os.path.abspath(os.path.expanduser(self.resume_from_path))
        if not os.path.isdir(folder):
            raise CheckpointError(f"trainer.resume_from_path={self.resume_from_path!r}: no such folder")
        return folder

    def _position(self, folder: Path, step: int) -> State:
        """Return the loader's state of this rank, or of the rank that it replaces under another number of ranks."""
        ranks = self.engine.get_data_parallel_size()
        written = len(list(folder.glob(files.DATA_GLOB)))
        if _RANKS_KEY in self.run_state:
            written = self.run_state[_RANKS_KEY]
        elif written not in (0, ranks):
            raise CheckpointError(
                f"checkpoint {folder} was written by an older version with {written} data-parallel ranks, and only the "
                f"same number can resume it; this run has {ranks}: start {written}, or set trainer.resume_mode=disable"
            )
        path = folder / self._loader_file(written)
        try:
            state = load_state(path, self.trusted_classes)
        except FileNotFoundError:
            raise CheckpointError(f"{path} {MISSING_DATA}, or set trainer.resume_mode=disable") from None
        if not (isinstance(state, dict) and state.keys() == {_STEP_KEY, _LOADER_KEY}):
            return state  # a file of an older version, or of another tool
        _check_step(path, state, step)
        return state[_LOADER_KEY]

    def _batch_size(self) -> int:
        return (self.train_dataloader.batch_size or 0) * self.engine.get_data_parallel_size()

    def _loader_file(self, num_files: int = 0) -> str:
        rank = self.engine.get_data_parallel_rank()
        return f"data_{rank % num_files if num_files else rank}.pt"

    @staticmethod
    def _barrier() -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()


def _counters(content: State) -> State:
    """Return the counters of a run. Raises: ValueError for another value."""
    counters = dict(content)
    for name in (_STEP_KEY, _BATCH_KEY, _RANKS_KEY, TOKENS_KEY):
        value = counters.get(name, 0)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name}={value!r} is no integer of 0 or more")
    return counters


def _check_step(path: Path, content: Mapping[str, Json], step: int) -> None:
    """Raise WrongInput for a file of another step; older versions do not write the step."""
    if _STEP_KEY in content and content[_STEP_KEY] != step:
        problem = f"its {path.name} was saved at step {content[_STEP_KEY]}: copy the file of step {step} back"
        raise damaged_checkpoint(path.parent, [problem], ANOTHER)
