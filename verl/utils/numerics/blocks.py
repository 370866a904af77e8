"""Matrix products whose rows do not depend on how many others come with them.

A plain product picks its kernel by the number of rows. On blocks of a fixed number of rows it does not, if one thread
computes it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK_ROWS = 16


def on_blocks(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return ``product(rows)`` of rows (N, D), computed on blocks of 16 rows, the last one padded with zeros."""
    count = rows.shape[0]
    if count != _BLOCK_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -count % _BLOCK_ROWS))
    blocks = [product(block) for block in rows.split(_BLOCK_ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:count]


def product_on_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear``, computed on blocks of 16 rows."""
    rows = x.reshape(-1, x.shape[-1])
    product = on_blocks(lambda block: torch.nn.functional.linear(block, weight, bias), rows)
    return product.reshape(*x.shape[:-1], weight.shape[0])
