"""Join the FSDP shards of all ranks into full tensors, one at a time."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl.model_merger.base import check_files
from verl.utils.checkpoint.files import LAYOUT_NAME, CheckpointError, FileRecord, Manifest
from verl.utils.checkpoint.fsdp_checkpoint_manager import part_name, quiet_device_mesh

MESHES = (("fsdp",), ("ddp", "fsdp"))

State = dict[str, Tensor | DTensor]


def check_checkpoint(folder: Path) -> int:
    """Return the number of ranks that wrote a checkpoint, after verifying its model files.

    Raises: CheckpointError naming every file that is missing, truncated or changed.
    """

    def needed(manifest: Manifest) -> list[FileRecord]:
        name = part_name("model", manifest.world_size, manifest.rank)
        if name not in {record.name for record in manifest.files}:
            raise CheckpointError(f"{name} was never saved: checkpoint.save_contents must name the model")
        return [each for each in manifest.files if each.name == name or each.name.startswith("huggingface/")]

    return check_files(folder, LAYOUT_NAME, needed)


class ShardedState(Mapping[str, Tensor]):
    """The full state dict of a run; each access joins one tensor.

    The files are memory-mapped. Raises: CheckpointError if they do not belong together.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.first = _load(folder, world_size, 0)
        self.shards = [self.first]
        self.shards += [_load(folder, world_size, rank) for rank in range(1, self._shard_size(folder, world_size))]
        for rank, shard in enumerate(self.shards):
            if shard.keys() != self.first.keys():
                name = min(shard.keys() ^ self.first.keys())
                raise CheckpointError(f"the files of ranks 0 and {rank} hold different tensors, such as {name}")

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
            raise CheckpointError(f"the shards of {name} join to {tuple(whole.shape)} instead of {tuple(tensor.shape)}")
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)


def _read(path: Path) -> State:
    """Read a file of tensors, including tensors from Ascend devices on a machine without torch_npu."""
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        if not str(error).rstrip().endswith("device string: npu"):
            raise
        # Without torch_npu, torch does not know the device name. Registering it is irreversible, and this process
        # cannot join a process group afterwards.
        torch.utils.rename_privateuse1_backend("npu")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state


def _load(folder: Path, world_size: int, rank: int) -> State:
    """Memory-map a file; only tensors and plain containers are unpickled."""
    path = folder / part_name("model", world_size, rank)
    try:
        with quiet_device_mesh():
            return _read(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
