"""The type of the context that the two passes of an autograd function share."""

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """What torch gives as ``ctx``; a subclass names what else the forward pass keeps for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and outputs of the forward pass."""
        ...
