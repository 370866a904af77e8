"""The process groups of Megatron-Core.

``parallel_state`` holds one set of groups per process, so all engines of a process share one layout.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from verl.base_config import as_yaml
from verl.errors import WrongInput
from verl.utils.device import current_device, get_device_name
from verl.utils.device.gloo import use_one_thread
from verl.utils.distributed import group_timeout, initialize_lone_process_group
from verl.utils.megatron.ranks import Place, expert_layout_problem, place_of
from verl.utils.numerics.seeding import derive_seed, seed_process
from verl.workers.engine.passes import Shares

if TYPE_CHECKING:
    from verl.workers.config import McoreEngineConfig


@dataclass(frozen=True)
class Layout(Place):
    """The position of this process in the parallel layout; ``virtual_stages`` is its number of model chunks.

    ``shares`` are the ranks of this stage over which a mini-batch adds up.
    """

    rank: int
    world_size: int
    device: torch.device
    shares: Shares
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    cp_group: ProcessGroup
    virtual_stages: int


def make_layout(config: "McoreEngineConfig") -> Layout:
    """Lay out the ranks, or join the layout that this process already has.

    Raises: ValueError when the sizes do not divide the ranks, or another engine of this process has other sizes.
    """
    use_one_thread()
    if not dist.is_initialized():
        initialize_lone_process_group()
    world_size = dist.get_world_size()
    place = place_of(dist.get_rank(), world_size, vars(config))
    sizes = {
        "tensor_model_parallel_size": place.tp_size,
        "pipeline_model_parallel_size": place.pp_size,
        "context_parallel_size": place.cp_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size or place.tp_size,
    }
    if (found := expert_layout_problem(world_size, vars(config), get_device_name() == "cpu")) is not None:
        key, value, fault = found
        raise WrongInput(f"megatron.{key}={as_yaml(value)} {fault}")
    if parallel_state.model_parallel_is_initialized():
        _same_layout(sizes)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(config.virtual_pipeline_model_parallel_size)
    else:
        parallel_state.initialize_model_parallel(
            **sizes,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=group_timeout().total_seconds() / 60,
        )
        _seed(config.seed, place)
    device = current_device()
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dp_group = parallel_state.get_data_parallel_group()
    return Layout(
        **vars(place),
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        shares=Shares(whole.size(), place.cp_size, device, whole, place.dp_rank, dp_group),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
    )


def _seed(seed: int, place: Place) -> None:
    """Seed this process by its position in the data, context and pipeline parallel groups.

    Tensor-parallel ranks start alike, since they must agree on the dropout of whole activations. Megatron-Core's
    tracker gives them different states for the parts that they hold alone.
    """
    ranks = (place.pp_rank, place.dp_rank, place.cp_rank)
    seed_process(seed, "megatron", *ranks)
    model_parallel_cuda_manual_seed(derive_seed(seed, "megatron", *ranks))


def _same_layout(sizes: dict[str, int]) -> None:
    have = {key: getattr(parallel_state, f"get_{key.removesuffix('_size')}_world_size")() for key in sizes}
    other = {key: size for key, size in sizes.items() if have[key] != size}
    if other:
        found = ", ".join(f"megatron.{key}={size}, which is {have[key]} there" for key, size in other.items())
        raise ValueError(
            f"roles that share a process share one layout, and the first role has another: {found}; write the same "
            "sizes for all roles"
        )
