"""Matrix products with weights in the layout of oneDNN, and these weights read back from it."""

import torch
from torch import Tensor

from verl.utils.numerics.blocks import product_on_blocks

_USUAL_ROWS = 128  # for which oneDNN chooses the layout


class PackedProduct:
    """``torch.nn.functional.linear`` with a weight (N, D) that is packed once, in fp32 or bf16 on a CPU.

    Args: with ``on_blocks`` a row of the product depends on no other row; see ``product_on_blocks``.
    Raises: RuntimeError if the packed weight, read back, is not the given one.
    """

    def __init__(self, weight: Tensor, on_blocks: bool) -> None:
        self._on_blocks = on_blocks
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _USUAL_ROWS)
        if not self.weight().equal(weight.detach()):
            raise RuntimeError(f"oneDNN changes a weight of shape {tuple(weight.shape)} when it packs it")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of rows ``x`` (..., D) with the packed weight; ``weight`` gives only its shape."""
        if self._on_blocks:
            return product_on_blocks(x, weight, bias, self._product)
        return self._product(x.contiguous(), weight, bias)

    def weight(self) -> Tensor:
        """Return the weight in its plain layout, unpacked from the layout of the matrix products."""
        return self._packed.to_dense()

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
