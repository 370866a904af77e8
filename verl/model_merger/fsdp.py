"""Read an FSDP checkpoint: join the shards of all ranks into full tensors, one at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.errors import CheckpointError
from verl.model_merger.base import HF_FOLDER, BaseMerger, MergeOptions
from verl.utils.checkpoint.files import LAYOUT_NAME, FileRecord, Manifest
from verl.utils.checkpoint.fsdp_checkpoint_manager import part_name
from verl.utils.fsdp_utils import ADAPTER_PREFIX, parameters_on_meta
from verl.utils.json_types import JsonObject
from verl.utils.loading import load_tensors
from verl.utils.model import get_hf_auto_model_class, get_value_model_class
from verl.workers.engine.fsdp.adapters import ADAPTER_FOLDER, AdapterMerger, adapters_of, base_name, is_adapter
from verl.workers.engine.fsdp.build import checkpoint_names, remember_conversions
from verl.workers.engine.weights import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MESHES = (("fsdp",), ("ddp", "fsdp"))


class FSDPMerger(BaseMerger):
    """Reads the weights of one checkpoint that FSDP wrote."""

    layout_name = LAYOUT_NAME

    def __init__(self, options: MergeOptions) -> None:
        super().__init__(options)
        self.state = ShardedState(self.folder, self.world_size)
        self.places = {plain: key for key in self.state if (plain := base_name(key)) is not None}
        self.adapter_config = self._adapter_config() if any(map(is_adapter, self.state)) else {}
        self.model = self._empty_model()
        self.num_tensors = len(dict(self.model.named_parameters()))

    @staticmethod
    def needed_files(manifest: Manifest) -> list[FileRecord]:
        """Return the weights and the model's configuration. Raises: CheckpointError if there are no weights."""
        name = part_name("model", manifest.world_size, manifest.rank)
        if name not in {record.name for record in manifest.files}:
            raise CheckpointError(f"{name} was never saved: checkpoint.save_contents must name the model")
        return [each for each in manifest.files if each.name == name or each.name.startswith("huggingface/")]

    def _adapter_config(self) -> JsonObject:
        path = self.folder / ADAPTER_FOLDER / "adapter_config.json"
        try:
            content: JsonObject = json.loads(path.read_text(encoding="utf-8"))
            if not (content["r"] > 0 and content["lora_alpha"] is not None):
                raise ValueError(f"r={content['r']} must be 1 or more")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}, which holds the scale of the adapters, cannot be read: {error}") from error
        return content

    def _empty_model(self) -> "PreTrainedModel":
        """Build the model without storage, for its parameter names, order, ties and conversions."""
        self.is_value_model = any(name.startswith(HEAD) for name in self.places)
        if self.options.is_value_model and not self.is_value_model:
            raise CheckpointError(f"--is-value-model: {self.folder} is not a critic: it has no tensor {HEAD}weight")
        auto_class = get_value_model_class(self.config) if self.is_value_model else get_hf_auto_model_class(self.config)
        with self.using_config(), parameters_on_meta():
            model: PreTrainedModel = auto_class.from_config(
                self.config, trust_remote_code=self.options.trust_remote_code
            )
        self.config.architectures = model.config.architectures = [type(model).__name__]
        remember_conversions(model, prefixed=self.prefixed)
        self._check_names(model)
        return model

    def _check_names(self, model: "PreTrainedModel") -> None:
        every = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in model.named_parameters()}
        missing = [name for name in shapes if name not in self.places]
        unexpected = [name for name in self.places if name not in every and name not in model.state_dict()]
        if missing or unexpected:
            problem = f"the checkpoint lacks {missing[0]}" if missing else f"the model has no parameter {unexpected[0]}"
            raise CheckpointError(f"{self.folder / HF_FOLDER / 'config.json'} is of another model: {problem}")
        for name, shape in shapes.items():
            found = self.state.first[self.places[name]].shape
            if found != shape:
                raise CheckpointError(f"{name} has shape {tuple(found)}, but config.json needs {tuple(shape)}")

    # ---- streams

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), tied tensors once."""
        yield from ((name, self.cast(name, tensor)) for name, tensor in checkpoint_names(self.model, self._in_memory()))

    def _in_memory(self) -> Iterator[tuple[str, Tensor]]:
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        names = dict(self.model.named_parameters())
        buffers = [name for name in self.model.state_dict() if name not in tied and name in self.places]
        merger = self._adapter_merger() if self.options.merge_lora and self.adapter_config else None
        for name in [*names, *buffers]:
            key = self.places[name]
            whole = self.state[key]
            yield name, whole if merger is None else merger.merged(key, whole)

    def _adapter_merger(self) -> AdapterMerger:
        with parameters_on_meta():
            wrapped = adapters_of(self._empty_model(), self.folder / ADAPTER_FOLDER)
        return AdapterMerger(wrapped, self.state)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained adapter tensors under peft's names."""
        whole = tuple(f"{ADAPTER_PREFIX}{name}." for name in self.adapter_config.get("modules_to_save") or ())
        for key in self.state:
            if is_adapter(key) or key.startswith(whole):
                yield key.replace(".default", ""), self.cast(key, self.state[key])


class ShardedState(Mapping[str, Tensor]):
    """The full state dict of a run; each access joins one tensor.

    The files are memory-mapped. Raises: CheckpointError if they do not belong together.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.first = _read(folder / part_name("model", world_size, 0))
        others = range(1, self._shard_size(folder, world_size))
        self.shards = [self.first, *(_read(folder / part_name("model", world_size, rank)) for rank in others)]
        for rank, shard in enumerate(self.shards):
            if shard.keys() != self.first.keys():
                name = min(shard.keys() ^ self.first.keys())
                files = f"{part_name('model', world_size, 0)} and {part_name('model', world_size, rank)}"
                raise CheckpointError(
                    f"{files} in {folder} hold different tensors, such as {name}: copy both from one checkpoint"
                )

    def _shard_size(self, folder: Path, world_size: int) -> int:
        """Return the number of ranks that one copy of the weights is sharded over; the other ranks' files repeat it."""
        for name, tensor in self.first.items():
            if not isinstance(tensor, DTensor):
                continue
            axes = tensor.device_mesh.mesh_dim_names
            if axes not in MESHES:
                raise CheckpointError(f"{folder}: {name} is sharded over mesh {axes}; only {MESHES} can be merged")
            sizes = tuple(tensor.device_mesh.shape)
            if torch.Size(sizes).numel() != world_size:
                raise CheckpointError(
                    f"{folder}: {name} is sharded over mesh {sizes}, but {world_size} ranks wrote the checkpoint"
                )
            return int(sizes[-1])
        return 1

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.first[name]
        if not isinstance(tensor, DTensor):
            return tensor
        placement = tensor.placements[-1]
        if isinstance(placement, Replicate):
            return tensor.to_local()
        if type(placement) is not Shard:
            raise CheckpointError(f"{name} has placement {placement}; only Shard and Replicate can be merged")
        whole = torch.cat([shard[name].to_local() for shard in self.shards], dim=placement.dim)
        if whole.shape != tensor.shape:
            shapes = f"{tuple(whole.shape)} instead of {tuple(tensor.shape)}"
            raise CheckpointError(
                f"the shards of {name} in {self.folder} join to {shapes}: copy all files from one checkpoint"
            )
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)


def _read(path: Path) -> dict[str, Tensor | DTensor]:
    """Memory-map a file of tensors, including tensors from Ascend devices on a machine without torch_npu."""
    try:
        return _checked(path, load_tensors(path, mmap=True))
    except CheckpointError as error:
        if not str(error.__cause__).rstrip().endswith("device string: npu"):
            raise
    # Without torch_npu, torch does not know the device name. Registering it is irreversible, and this process cannot
    # join a process group afterwards.
    torch.utils.rename_privateuse1_backend("npu")
    return _checked(path, load_tensors(path, mmap=True))


def _checked(path: Path, state: object) -> dict[str, Tensor | DTensor]:
    """Return the content of a file if it is a mapping from names to tensors."""
    if isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        return state
    raise CheckpointError(f"{path} holds no tensors by name: copy the file of the checkpoint back")
