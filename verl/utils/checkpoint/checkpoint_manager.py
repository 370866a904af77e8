"""Base of the checkpoint managers: contents, random states, retention, and agreement of the ranks."""

import json
import logging
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from verl.errors import CheckpointError, ContractError, WrongInput
from verl.utils import envs, hdfs_io
from verl.utils.checkpoint import files
from verl.utils.checkpoint.files import CONTENTS as CONTENTS
from verl.utils.checkpoint.files import HF_FOLDER as HF_FOLDER
from verl.utils.checkpoint.files import FileRecord
from verl.utils.checkpoint.files import find_latest_ckpt_path as find_latest_ckpt_path
from verl.utils.checkpoint.files import get_checkpoint_tracker_filename as get_checkpoint_tracker_filename
from verl.utils.checkpoint.files import should_save_ckpt_esi as should_save_ckpt_esi
from verl.utils.checkpoint.hf_export import SourceFiles, other_dtypes, weights_mode
from verl.utils.checkpoint.model_fields import FIELDS_KEY, fields_problem
from verl.utils.checkpoint.optimizer_settings import Settings
from verl.utils.checkpoint.removal import remove_checkpoint
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.fs import copy_to_local
from verl.utils.json_types import Json, JsonObject
from verl.utils.loading import State

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BaseCheckpointManager(ABC):
    """Save and load the parts that ``checkpoint_config`` (``save_contents, load_contents``) lists.

    The parts: ``model`` and ``optimizer``, sharded; ``extra``, the learning rate schedule and the random states;
    ``hf_model``, full weights for ``from_pretrained``.

    ``source_folder`` and ``source_dtype`` describe the model that training started from; its dtype may differ from
    the training dtype. ``keeps_settings`` lets a loaded optimizer keep learning rate, weight decay and betas of the
    checkpoint where the settings of this run differ. ``source_files`` are the files of the source model, from which a
    folder for ``from_pretrained`` is made. ``schedule`` holds the keys of ``optim`` that define ``lr_scheduler``.
    """

    model: nn.Module | list[nn.Module]
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Stateful | None = None
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin | None" = None
    checkpoint_config: InitVar[Mapping[str, Json] | None] = None
    source_dtype: torch.dtype | None = None
    source_folder: str | None = None
    keeps_settings: bool = False
    source_files: SourceFiles | None = None
    schedule: Settings | None = None
    more_layout_fields: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self, checkpoint_config: Mapping[str, Json] | None) -> None:
        self.save_contents = _contents(checkpoint_config, "save_contents", files.DEFAULT_CONTENTS)
        self.load_contents = _contents(checkpoint_config, "load_contents", self.save_contents)
        self.should_save_model = "model" in self.save_contents
        self.should_save_optimizer = "optimizer" in self.save_contents
        self.should_save_extra = "extra" in self.save_contents
        self.should_save_hf_model = "hf_model" in self.save_contents
        self.should_load_model = "model" in self.load_contents
        self.should_load_optimizer = "optimizer" in self.load_contents
        self.should_load_extra = "extra" in self.load_contents
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part; collective."""

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore the parts in ``load_contents``; collective.

        Raises: CheckpointError, a ValueError, naming the file, the problem, and what to do.
        """
        self.check_parts("load_contents")
        path = self.checkpath(local_path, hdfs_path)
        folder = Path(copy_to_local(path) if hdfs_io.is_hdfs(path) else path)
        # No rank may remove the copy, or go on to train, while another one still reads.
        self._load(folder, local_path)
        self.barrier()
        if del_local_after_load and self.is_node_leader():
            remove_checkpoint(folder)

    @abstractmethod
    def _load(self, folder: Path, local_path: str) -> None:
        """Restore this rank's part from a local folder; ``local_path`` names the checkpoint in messages."""

    @staticmethod
    def checkpath(local_path: str | None, hdfs_path: str | None) -> str:
        """Return the local path if given, else the HDFS path.

        Raises: ValueError, also an AssertionError, when both are empty.
        """
        path = local_path or hdfs_path
        if not path:
            raise ContractError("a checkpoint needs local_path or hdfs_path")
        return path

    @staticmethod
    def get_rng_state() -> State:
        """Return the state of every random generator of this process, as plain containers and tensors."""
        kind, keys, *position = np.random.get_state()
        state: State = {
            "cpu": torch.get_rng_state(),
            # The reader of tensors refuses NumPy arrays, whose constructors it would have to call.
            "numpy": (kind, [int(key) for key in keys], *position),
            "random": random.getstate(),
        }
        if get_device_name() != "cpu":
            state[get_device_name()] = get_torch_device().get_rng_state()
        return state

    @staticmethod
    def load_rng_state(rng_state: Mapping[str, Any]) -> None:
        """Restore every random generator; a device that the checkpoint does not know keeps its state."""
        torch.set_rng_state(rng_state["cpu"])
        np.random.set_state(rng_state["numpy"])
        version, keys, gauss = rng_state["random"]
        random.setstate((version, tuple(keys), gauss))
        if get_device_name() in rng_state and get_device_name() != "cpu":
            get_torch_device().set_rng_state(rng_state[get_device_name()])

    def remove_previous_save_local_path(self, path: str | Iterable[str]) -> None:
        """Remove checkpoint folders of this node."""
        for folder in [path] if isinstance(path, str) else path:
            if os.path.isdir(folder):
                logger.info("removing checkpoint %s", folder)
                remove_checkpoint(folder)

    def keep_latest(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest complete checkpoints until ``max_ckpt_to_keep`` remain, including the one just written.

        The step in a folder's name orders the checkpoints on disk, so the limit holds across restarts. Incomplete
        checkpoints and later steps stay. None or 0 keeps all.
        """
        if not max_ckpt_to_keep or not self.is_node_leader():
            return
        older = earlier_checkpoints(local_path)
        surplus = len(older) + 1 - max_ckpt_to_keep
        self.remove_previous_save_local_path([str(folder) for folder in older[: max(0, surplus)]])

    def layout_fields(self) -> State:
        """Return the fields of every engine's layout file: the world size, dtypes of the source model, its values."""
        fields: State = {"world_size": self.world_size, **self.more_layout_fields}
        if (mode := self.weights_mode()) is not None:
            fields["weights_mode"] = mode
        if self.source_dtype is not None:
            fields["source_dtype"] = str(self.source_dtype).removeprefix("torch.")
            others = other_dtypes(self.source_folder or "", fields["source_dtype"]) if self.source_folder else {}
            fields |= {"other_dtypes": others} if others else {}
        own = self.model_fields()
        return fields | ({FIELDS_KEY: own} if own else {})

    @abstractmethod
    def model_fields(self) -> JsonObject:
        """Return the values of the model's configuration that its forward reads, by dotted name."""

    def other_model(self, folder: Path) -> str | None:
        """Return how the model differs from a checkpoint's in values that no weight shows; None if it does not."""
        layout = json.loads(files.layout_file(folder).read_text(encoding="utf-8"))
        # Older checkpoints do not hold the values.
        return fields_problem(layout[FIELDS_KEY], self.model_fields()) if FIELDS_KEY in layout else None

    def weights_mode(self) -> int | None:
        """Return the permissions of the source's weights; None if it has none on this machine."""
        return None if self.source_folder is None else weights_mode(self.source_folder)

    def is_node_leader(self) -> bool:
        """Whether this rank acts for its node."""
        return envs.integer("LOCAL_RANK", self.rank) == 0

    def complete(
        self, local_path: str, hdfs_path: str | None, step: int, records: list[FileRecord], max_ckpt_to_keep: int | None
    ) -> None:
        """Write this rank's manifest once all ranks have written their files, then drop old checkpoints; collective.

        The barriers order the steps across ranks: every file, then every manifest, then the removal of older
        checkpoints. A job that dies in between keeps a complete checkpoint.
        """
        self.barrier()
        files.Manifest(self.world_size, self.rank, step, records).write(local_path)
        self.barrier()
        self.keep_latest(local_path, max_ckpt_to_keep)
        if hdfs_path is not None and self.rank == 0:
            hdfs_io.put_folder(local_path, hdfs_path)
        self.barrier()

    def write_shared_folder(self, folder: Path, name: str, write: Callable[[Path | None], None]) -> list[FileRecord]:
        """Write a folder that the checkpoint holds once; every rank calls ``write``, all but rank 0 with None."""
        if self.rank != 0:
            write(None)
            return []
        with files.temporary_folder(folder, name) as unfinished:
            write(unfinished)
            # The folder is swapped whole: files of an earlier save that this one does not write must not stay in it.
            if self.source_folder is None or Path(self.source_folder).resolve() != (folder / name).resolve():
                files.remove_folder(folder / name)  # otherwise the run started from this folder
            return files.move_files(unfinished, folder, name)

    def check_parts(self, key: str) -> None:
        """Reject checkpoint contents for which this manager has no object.

        Raises: ValueError naming the config key.
        """
        parts: list[str] = getattr(self, key)
        if "optimizer" in parts and self.optimizer is None:
            raise WrongInput(f"checkpoint.{key} names the optimizer, but this model has none: write [model]")

    def stop_on(self, path: str, problems: list[str]) -> None:
        """Raise an error on all ranks if one of them has a problem; collective.

        Raises: CheckpointError with the problems and the checkpoint to use instead.
        """
        found = self.agree(problems)
        if found:
            raise CheckpointError(f"checkpoint {path} cannot be loaded: {'; '.join(found[:4])}. {way_out(path)}")

    def agree(self, problems: list[str]) -> list[str]:
        """Return the problems of all ranks, so that all continue or all stop; collective."""
        if self.world_size == 1:
            return problems
        gathered: list[list[str]] = [[]] * self.world_size
        dist.all_gather_object(gathered, problems)
        return [f"rank {rank}: {problem}" for rank, found in enumerate(gathered) for problem in found]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def _contents(config: Mapping[str, Any] | None, key: str, default: Iterable[str]) -> list[str]:
    """Read a list of parts from a config, which may be a mapping or an object with attributes.

    Raises: ValueError for an unknown part.
    """
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    parts = list(default if value is None else value)
    unknown = [part for part in parts if part not in CONTENTS]
    if unknown:
        raise WrongInput(f"checkpoint.{key}={parts} has unknown parts {unknown}: write parts of {list(CONTENTS)}")
    return parts


def _step_and_role(local_path: str) -> tuple[Path, int, Path] | None:
    """Split ``root/global_step_<N>[/role]`` into root, N and role."""
    path = Path(local_path).absolute()
    for folder, role in ((path, Path()), (path.parent, Path(path.name))):
        for step, found in files.step_folders(folder.parent):
            if found == folder:
                return folder.parent, step, role
    return None


def earlier_checkpoints(local_path: str, checksums: bool | None = False) -> list[Path]:
    """List the complete checkpoints of the same role at earlier steps, oldest first."""
    place = _step_and_role(local_path)
    if place is None:
        return []
    root, current, role = place
    return [
        folder / role
        for step, folder in files.step_folders(root)
        if step < current and (folder / role).is_dir() and not files.verify_checkpoint(folder / role, checksums)
    ]


def way_out(local_path: str) -> str:
    """Return advice which earlier checkpoint to use instead of a broken one."""
    earlier = earlier_checkpoints(local_path, checksums=None)
    if not earlier:
        return "There is no earlier complete checkpoint: trainer.resume_mode=disable starts from scratch"
    place = _step_and_role(local_path)
    folder = earlier[-1] if place is None or place[2] == Path() else earlier[-1].parent
    return (
        f"The latest earlier complete checkpoint is {folder}: resume from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={folder}"
    )
