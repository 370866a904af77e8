"""Offload of saved activations to host memory until the backward pass."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.utils.device import get_device_name

_STRATEGIES = ("fsdp", "fsdp2")
MIN_BYTES = 4096
"""Smaller tensors stay on the device: moving them costs more than it saves."""

_Moved = tuple[torch.device, Tensor]


def offloaded_activations(model: nn.Module, pin_memory: bool) -> AbstractContextManager[None]:
    """Return a context in which autograd saves activations for the backward pass in host memory.

    Weights, their views and gathered weights stay on the device: they are there anyway, or FSDP frees and gathers
    them again.
    """
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    owners = {_address(weight): weight for weight in weights}

    def moves(tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.nbytes < MIN_BYTES:
            return False  # parameters are subclasses of Tensor
        if isinstance(tensor._base, nn.Parameter):
            return False
        owner = owners.get(_address(tensor))  # FSDP may have freed it since, and an activation has its memory now
        return owner is None or _address(owner) != _address(tensor)

    def pack(tensor: Tensor) -> Tensor | _Moved:
        return (tensor.device, _to_host(tensor, pin_memory)) if moves(tensor) else tensor

    def unpack(packed: Tensor | _Moved) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=pin_memory)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _to_host(tensor: Tensor, pin_memory: bool) -> Tensor:
    if not pin_memory:
        return tensor.cpu()
    return torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def enable_activation_offloading(model: nn.Module, strategy: str, enable_ckpt: bool = False) -> None:
    """Make the forward pass of a model offload its saved activations, optionally with gradient checkpointing.

    Raises: ValueError for a strategy other than ``fsdp`` and ``fsdp2``.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(_STRATEGIES)}")
    if enable_ckpt:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = model.forward

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offloaded_activations(model, pin_memory=get_device_name() != "cpu"):
            return forward(*args, **kwargs)

    model.forward = offloading
