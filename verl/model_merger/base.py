"""Options of a merge, and the interface that each backend's checkpoint implements."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.base_config import one_line
from verl.errors import CheckpointError
from verl.utils.checkpoint import files
from verl.utils.checkpoint.files import HF_FOLDER as HF_FOLDER
from verl.utils.checkpoint.fsdp_checkpoint_manager import PREFIXED_KEY
from verl.utils.failures import replacing_errors
from verl.utils.json_types import JsonObject
from verl.workers.engine.weights import DTYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class MergeOptions:
    """The checkpoint to merge and how; ``dtype`` None is the source model's dtype if the checkpoint records it."""

    backend: str
    local_dir: str
    dtype: str | None = None
    merge_lora: bool = False
    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False


class BaseMerger(ABC):
    """Reads the weights of one checkpoint. Raises: CheckpointError if it is incomplete or does not match its config.

    Attributes: ``config`` describes the model to write; ``num_tensors`` is about how many tensors ``weights`` yields;
    ``adapter_config`` is empty without an adapter.
    """

    layout_name: str
    """The engine's layout file."""
    num_tensors: int
    is_value_model: bool
    adapter_config: JsonObject = {}

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.folder = Path(options.local_dir).expanduser()
        self.world_size = self._check_files()
        self.config = self._load_config()
        self._read_layout(self.folder / self.layout_name)

    def _read_layout(self, path: Path) -> None:
        """Read dtypes and file permissions of the model that training started from, if the checkpoint records them."""
        with files.reading(path):
            layout = json.loads(path.read_text(encoding="utf-8"))
            written = layout.get("source_dtype")
            self.source_dtype: torch.dtype | None = None if written is None else DTYPES[written]
            self.weights_mode: int | None = layout.get("weights_mode")
            self.prefixed: bool = layout.get(PREFIXED_KEY, False)
            if self.weights_mode not in (None, *range(0o10000)) or isinstance(self.weights_mode, bool):
                raise TypeError(f"weights_mode={self.weights_mode!r} must hold permissions, from 0 to {0o7777}")
            self.other_dtypes = {name: DTYPES[dtype] for name, dtype in dict(layout.get("other_dtypes", {})).items()}

    @staticmethod
    @abstractmethod
    def needed_files(manifest: files.Manifest) -> list[files.FileRecord]:
        """Return the files of a rank that a merge needs. Users may delete others, such as the optimizer's."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), tied tensors once."""

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained adapter tensors under peft's names."""
        yield from ()

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor to the requested dtype."""
        if not tensor.is_floating_point():
            return tensor
        if self.options.dtype is not None:
            return tensor.to(DTYPES[self.options.dtype])
        return tensor.to(self.other_dtypes.get(name) or self.source_dtype or tensor.dtype)

    def _check_files(self) -> int:
        """Return the number of ranks that wrote the checkpoint, after verifying the needed files of each."""
        if not (self.folder / self.layout_name).is_file():
            raise CheckpointError(f"{self.folder} holds no {self.layout_name}: {self._right_folder()}")
        try:
            world_size = files.read_world_size(self.folder)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {self.folder} cannot be merged: {error}") from error
        manifests, problems = files.read_manifests(self.folder, world_size)
        for manifest in manifests:
            try:
                needed = replace(manifest, files=self.needed_files(manifest))
                problems += files.file_problems(self.folder, needed, checksums=True)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(f"checkpoint {self.folder} cannot be merged: {'; '.join(problems)}")
        return world_size

    def _right_folder(self) -> str:
        """Return a hint at the right folder when a parent or another backend's folder was given."""
        expected = "--local_dir must be the folder of one role, <run>/global_step_<N>/actor"
        if not self.folder.is_dir():
            return f"it is not a folder; {expected}"
        for name in files.LAYOUT_NAMES:
            if (self.folder / name).is_file():
                return f"use --backend {name.split('_')[0]}, which wrote its {name}"
        layouts = [*self.folder.glob(f"*/{self.layout_name}"), *self.folder.glob(f"*/*/{self.layout_name}")]
        found = sorted({str(path.parent) for path in layouts})
        return f"{expected}; use one of {', '.join(found)}" if found else expected

    def using_config(self) -> AbstractContextManager[None]:
        """Add the name of the model's configuration to errors that its code raises."""

        def named(error: Exception) -> CheckpointError:
            reason = one_line(str(error) if isinstance(error, ValueError | OSError) else repr(error))
            return CheckpointError(f"{self.folder / HF_FOLDER} holds no valid model configuration: {reason}")

        return replacing_errors(named, passes=(CheckpointError,))

    def _load_config(self) -> "PretrainedConfig":
        """Return the model configuration of the checkpoint, with the tie that the options ask for."""
        from transformers import AutoConfig

        path = self.folder / HF_FOLDER
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path / 'config.json'} is missing: copy it back, or that of the model that training started from"
            )
        with self.using_config():
            config: PretrainedConfig = AutoConfig.from_pretrained(
                path, trust_remote_code=self.options.trust_remote_code
            )
        if self.options.tie_word_embedding:
            config.tie_word_embeddings = True
        return config
