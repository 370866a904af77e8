"""The ranks that shard the weights, hold replicas of them, or share a sequence."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.errors import WrongInput
from verl.utils.device import current_device, get_device_name
from verl.utils.device.gloo import use_one_thread
from verl.utils.distributed import initialize_lone_process_group, take_over_timeout
from verl.workers.engine.passes import Shares

if TYPE_CHECKING:
    from verl.workers.config import FSDPEngineConfig


def create_device_mesh(world_size: int, fsdp_size: int) -> DeviceMesh:
    """Return the mesh ``(fsdp,)``, or ``(ddp, fsdp)`` if ``fsdp_size`` ranks hold one copy of the weights.

    Raises: ValueError when ``fsdp_size`` does not divide the ranks.
    """
    device = get_device_name()
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    if world_size % fsdp_size:
        raise WrongInput(f"fsdp_config.fsdp_size={fsdp_size} must divide the {world_size} ranks, or be -1")
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


@dataclass(frozen=True)
class Layout:
    """The place of this process.

    ``fsdp_mesh`` is None when the model is an ordinary module. The ranks of ``sp_group`` share a sequence, of which
    this rank holds slice ``sp_rank``; neighbours share one. ``shard_group`` holds one copy of the weights.
    """

    world_size: int
    device: torch.device
    shares: Shares
    sp_size: int
    sp_rank: int
    sp_group: ProcessGroup | None
    fsdp_mesh: DeviceMesh | None
    shard_group: ProcessGroup | None


def make_layout(config: "FSDPEngineConfig", must_wrap: bool) -> Layout:
    """Lay out the ranks; ``must_wrap`` wraps a single process too, because precision or offload need FSDP's hooks.

    Raises: ValueError when a size does not divide the ranks.
    """
    use_one_thread()
    ready = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if ready else 1
    rank = dist.get_rank() if ready else 0
    sp_size = config.ulysses_sequence_parallel_size
    if world_size % sp_size:
        raise WrongInput(f"ulysses_sequence_parallel_size={sp_size} must divide the {world_size} ranks")
    device = current_device()
    fsdp_mesh = shard_group = sp_group = dp_group = None
    if world_size > 1 or must_wrap:
        if not ready:
            initialize_lone_process_group()
        fsdp_mesh = create_device_mesh(world_size, config.fsdp_size)
        take_over_timeout(fsdp_mesh)
        shard_group = fsdp_mesh["fsdp"].get_group()
    if sp_size > 1:
        shape = (world_size // sp_size, sp_size)
        sequence_mesh = init_device_mesh(get_device_name(), shape, mesh_dim_names=("dp", "sp"))
        take_over_timeout(sequence_mesh)
        sp_group = sequence_mesh["sp"].get_group()
        dp_group = sequence_mesh["dp"].get_group()
    elif world_size > 1:
        dp_group = dist.group.WORLD
    shares = Shares(world_size, sp_size, device, None, rank // sp_size, dp_group)
    return Layout(world_size, device, shares, sp_size, rank % sp_size, sp_group, fsdp_mesh, shard_group)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` wraps a module or a part of it."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def check_layout(module: nn.Module, layout: Layout) -> None:
    """Check that a module is sharded over the mesh of the layout.

    Raises: ValueError naming both meshes.
    """
    meshes = {parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)}
    found = sorted({tuple(mesh.shape) for mesh in meshes})
    expected = [] if layout.fsdp_mesh is None else [tuple(layout.fsdp_mesh.shape)]
    if found != expected:
        wanted = f"the {layout.world_size} ranks and fsdp_config.fsdp_size ask for a mesh of shape {expected}"
        raise ValueError(
            f"the module's parameters are sharded over {found or 'no mesh'}, but {wanted}: apply fully_shard to it "
            "over that mesh (verl.workers.fsdp_workers.create_device_mesh), or set fsdp_size"
        )
