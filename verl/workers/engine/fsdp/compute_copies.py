"""Mixed precision of one rank without FSDP: the module computes with copies of its weights in another dtype.

With one rank ``fully_shard`` shards nothing, and is there for its dtypes only. It casts and copies each parameter
several times in a pass, unit by unit. On a GPU, a small model waits for the launch of these kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from verl.workers.engine.fsdp.layout import is_sharded

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Place = tuple[dict[str, Any], str]
"""A module's table of parameters, and the name of a parameter in the table."""

WHOLE_MODEL_BYTES = 2 << 30
"""Parameters of models up to this size may be held whole by a rank, a second time, while it computes."""
_MARK = "_verl_compute_copies"


def dtype_of_copies(module: nn.Module, policy: MixedPrecisionPolicy | None, keeps_gathered: bool) -> torch.dtype | None:
    """Return the dtype of copies that are equivalent to ``fully_shard`` on one rank; None if no dtype is.

    Args: with ``keeps_gathered`` the whole weights may stay gathered between forward and backward; small models may
        always.
    """
    if policy is None or policy.reduce_dtype != torch.float32:
        return None
    parameters = list(module.parameters())
    size = sum(each.numel() * each.element_size() for each in parameters)
    is_served = all(each.dtype == torch.float32 for each in parameters) and (
        keeps_gathered or size <= WHOLE_MODEL_BYTES
    )
    return policy.param_dtype if is_served else None


class ComputeCopies:
    """Copies of a module's weights, which replace them during passes. Results equal those of ``fully_shard``.

    Gradients add up in fp32, in ``grad`` of the module's own parameters. A call of the module outside of ``in_place``
    makes copies for itself. With gradient checkpointing it cannot, since the backward pass calls layers again: then
    such a call computes with the weights as they are.

    Args: ``units`` are the modules whose inputs are cast, as ``fully_shard`` casts those of its units.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._module = module
        self._units = list(dict.fromkeys((*units, module)))
        self._dtype = dtype
        self._is_in_place = False
        self._call: ExitStack | None = None
        module.__dict__[_MARK] = self
        module.register_forward_pre_hook(self._begin_call, with_kwargs=True)
        module.register_forward_hook(self._end_call, always_call=True)

    @staticmethod
    def of(module: nn.Module) -> "ComputeCopies | None":
        """Return the copies with which a module computes, if it has any."""
        return module.__dict__.get(_MARK)

    def serve_another(self, module: nn.Module) -> None:
        """Let another module, which may share layers with this one, compute in the same dtype."""
        parts = set(module.modules())
        ComputeCopies(module, [unit for unit in self._units if unit in parts], self._dtype)

    @contextmanager
    def in_place(self, trains: bool) -> Iterator[None]:
        """Let the module compute with new copies; with ``trains`` their gradients go to its own parameters.

        The context spans the backward pass too: with gradient checkpointing that computes layers again.
        """
        places = self._places()
        if not places:
            yield
            return
        own: list[Tensor] = list(places)
        made = [torch.empty_like(each, dtype=self._dtype) for each in own]
        with torch.no_grad():
            torch._foreach_copy_(made, own)
        with ExitStack() as stack:
            for unit in self._units:
                hook = unit.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            for weight, copy in zip(own, made, strict=True):
                leaf = nn.Parameter(copy, requires_grad=trains and weight.requires_grad)
                if leaf.requires_grad:
                    hand_over = partial(_hand_over, weight)
                    leaf.register_post_accumulate_grad_hook(hand_over)
                for table, name in places[weight]:
                    table[name] = leaf
                    stack.callback(table.__setitem__, name, weight)
            self._is_in_place = True
            stack.callback(setattr, self, "_is_in_place", False)
            yield

    def _places(self) -> dict[Tensor, list[Place]]:
        """Return where the module holds each of its weights.

        Empty if the user has sharded the module: then the user's dtypes apply.
        """
        places: dict[Tensor, list[Place]] = {}
        if is_sharded(self._module):
            return places
        for part in self._module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    places.setdefault(parameter, []).append((part._parameters, name))
        return places

    def _begin_call(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        trains = torch.is_grad_enabled()
        if self._is_in_place or (trains and getattr(module, "is_gradient_checkpointing", False)):
            return None
        self._call = ExitStack()
        self._call.enter_context(self.in_place(trains))
        return self._cast_inputs(module, args, kwargs) if self._is_in_place else None

    def _end_call(self, *_: T) -> None:
        call = self._call
        self._call = None
        if call is not None:
            call.close()

    def _cast_inputs(self, unit: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return tree_map(self._cast, (args, kwargs))

    def _cast(self, value: T) -> T | Tensor:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _hand_over(own: Tensor, leaf: Tensor) -> None:
    """Add the gradient of a copy to that of the parameter."""
    assert leaf.grad is not None
    if own.grad is None:
        own.grad = leaf.grad.to(own.dtype)
    else:
        own.grad.add_(leaf.grad)
    leaf.grad = None
