"""Options of a merge, and the interface that each backend's checkpoint implements."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.utils.checkpoint import files
from verl.workers.engine.weights import DTYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF_FOLDER = "huggingface"


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
    """Reads the weights of one checkpoint.

    Attributes: ``config`` describes the model to write; ``num_tensors`` is about how many tensors ``weights`` yields.
    """

    num_tensors: int
    has_adapter = False
    adapter_config: dict[str, Any] = {}
    config: "PretrainedConfig"

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.folder = Path(options.local_dir).expanduser()
        self.source_dtype: torch.dtype | None = None
        self.other_dtypes: dict[str, torch.dtype] = {}

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), tied tensors once."""

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained adapter tensors under peft's names."""
        yield from ()

    def read_dtypes(self, layout_name: str) -> None:
        """Read the dtypes of the model that training started from, if the checkpoint records them."""
        fields = json.loads((self.folder / layout_name).read_text())
        self.source_dtype = DTYPES.get(fields.get("source_dtype"))
        self.other_dtypes = {name: DTYPES[dtype] for name, dtype in fields.get("other_dtypes", {}).items()}

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor to the requested dtype."""
        if not tensor.is_floating_point():
            return tensor
        if self.options.dtype is not None:
            return tensor.to(DTYPES[self.options.dtype])
        return tensor.to(self.other_dtypes.get(name) or self.source_dtype or tensor.dtype)


def right_folder(folder: Path, layout_name: str) -> str:
    """Return a hint at the right folder when a parent or another backend's folder was given."""
    expected = "--local_dir must be the folder of one role, <run>/global_step_<N>/actor"
    if not folder.is_dir():
        return f"it is not a folder; {expected}"
    other = next((name for name in files.LAYOUT_NAMES if name != layout_name and (folder / name).is_file()), None)
    if other is not None:
        return f"use --backend {other.split('_')[0]}, which wrote its {other}"
    found = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{layout_name}")})
    return f"{expected}; use one of {', '.join(map(str, found))}" if found else expected


def check_files(folder: Path, layout_name: str, needed_of: Callable[[files.Manifest], list[files.FileRecord]]) -> int:
    """Return the number of ranks that wrote a checkpoint, after verifying the files that a merge needs of each rank.

    Users may delete other files, such as the optimizer's, to free space.

    Raises: CheckpointError naming every file that is missing, truncated or changed.
    """
    if not Path(folder, layout_name).is_file():
        raise files.CheckpointError(f"{folder} holds no {layout_name}: {right_folder(folder, layout_name)}")
    world_size = files.read_world_size(folder)
    manifests, problems = files.read_manifests(folder, world_size)
    for manifest in manifests:
        try:
            problems += files.file_problems(folder, replace(manifest, files=needed_of(manifest)), checksums=True)
        except files.CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise files.CheckpointError(f"checkpoint {folder} cannot be merged: {'; '.join(problems)}")
    return world_size


def load_config(folder: Path, trust_remote_code: bool) -> "PretrainedConfig":
    """Return the model configuration of a checkpoint. Raises: CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = folder / HF_FOLDER
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise files.CheckpointError(f"{path} holds no valid model configuration: {error}") from error
    return config
