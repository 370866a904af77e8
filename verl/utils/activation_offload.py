"""What the backward pass needs, kept in host memory until then."""

import functools
from typing import Any

import torch
from torch import nn

_STRATEGIES = ("fsdp", "fsdp2")


def enable_activation_offloading(model: nn.Module, strategy: str, enable_ckpt: bool = False) -> None:
    """Have the forward pass of a model move its saved activations to the host, with checkpointing where asked for.

    Raises: ValueError for a strategy other than ``fsdp`` and ``fsdp2``.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(_STRATEGIES)}")
    if enable_ckpt:
        checkpointed: Any = model
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = model.forward

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    model.forward = offloading  # type: ignore[method-assign]
