"""The type of the first argument of an autograd function."""

from typing import Protocol

from torch import Tensor


class Kept(Protocol):
    """Values that a forward pass keeps for the backward pass; a function names its own in a class derived from this."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of ``save_for_backward``."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and outputs."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare outputs through which no gradient flows."""
