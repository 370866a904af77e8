"""Move the weights of a module into memory that another engine reads too."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.errors import WrongInput
from verl.utils.model import stored_buffers
from verl.workers.engine.fsdp.adapters import has_adapters
from verl.workers.engine.fsdp.build import checkpoint_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resident_tensors(module: nn.Module, model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return the tensors in which one rank holds a whole model, by the names of a published checkpoint.

    A parameter that ``fully_shard`` has wrapped is there as its local tensor, and a tied parameter once.

    Raises: WrongInput for adapters, for a shard, and for a tensor that a checkpoint holds in another form.
    """
    if has_adapters(module):
        raise WrongInput("adapters are merged into a copy of the weights, which the engine cannot share")
    return {
        _only_name(model, name, tensor): tensor
        for name, parameter in _all_tensors(module)
        for tensor in (_local(name, parameter),)
    }


def move_tensors(module: nn.Module, model: "PreTrainedModel", places: Mapping[str, Tensor]) -> None:
    """Copy the weights to ``places``, by the names of ``resident_tensors``; from then on they live there.

    Parameters stay the objects that they are, so an optimizer goes on with them. The old memory is freed.
    """
    with torch.no_grad():
        for name, parameter in list(_all_tensors(module)):
            local = _local(name, parameter)
            place = places[_only_name(model, name, local)]
            place.copy_(local)
            if isinstance(parameter, DTensor):
                parameter._local_tensor = place
            else:
                parameter.data = place
    for part in module.modules():
        if isinstance(part, FSDPModule):
            _renew_views(part)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from stored_buffers(module)


def _local(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor._local_tensor.detach()
    if local.shape != tensor.shape:
        raise WrongInput(f"this worker holds a shard of tensor {name!r}, which the engine cannot share")
    return local


def _only_name(model: "PreTrainedModel", name: str, tensor: Tensor) -> str:
    """Return the name of a tensor in a checkpoint.

    Raises: WrongInput unless the checkpoint holds the tensor in the form that it has in memory.
    """
    stored = list(checkpoint_names(model, iter([(name, tensor)])))
    if len(stored) != 1 or _place(stored[0][1]) != _place(tensor):
        names = ", ".join(each for each, _ in stored[:3])
        raise WrongInput(f"a checkpoint holds tensor {name!r} in another form ({names}), which the engine cannot share")
    return stored[0][0]


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _renew_views(part: FSDPModule) -> None:
    """Let FSDP gather from the new memory: it keeps a flat view of each local tensor."""
    state: Any = part._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
