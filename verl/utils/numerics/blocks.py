"""Matrix products in which a row of the result does not depend on the number of rows.

torch chooses the kernel of a product by the number of rows. On blocks of a fixed number of rows, computed by one
thread, the kernel is always the same. Most kernels for more rows add in the same order and are faster: each is used
once a trial has shown that it gives the same bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK_ROWS = 16
_LARGER_BLOCKS = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32)
_PROBED_COLUMNS = 64
_PROBES_AT_MOST = 3
_may_replace: dict[tuple[object, ...], bool] = {}
_failed_probes: dict[tuple[object, ...], int] = {}


def on_blocks(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return ``product(rows)`` of rows (N, D), computed on blocks of 16 rows, the last one padded with zeros."""
    count = rows.shape[0]
    if count != _BLOCK_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -count % _BLOCK_ROWS))
    blocks = [product(block) for block in rows.split(_BLOCK_ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:count]


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product_on_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Product | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear``, bitwise equal to its result on blocks of 16 rows.

    Plain form: ``on_blocks(lambda block: linear(block, weight, bias), x)``. Larger blocks take the place of several
    where ``_gives_same_bits`` has found that their kernel gives the same. ``product`` may take the place of ``linear``.
    """
    product = product or torch.nn.functional.linear
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    padded = count + -count % _BLOCK_ROWS
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padded - count)) if padded != count else rows.contiguous()
    sizes = _split(padded, weight, bias, product)
    if len(sizes) <= 1:
        result = product(rows, weight, bias)
    else:
        result = torch.cat([product(block, weight, bias) for block in rows.split(sizes)])
    return result[:count].reshape(*x.shape[:-1], weight.shape[0])


def _split(rows: int, weight: Tensor, bias: Tensor | None, product: Product) -> list[int]:
    """Return the sizes of blocks, the largest first, that make up ``rows``, a multiple of 16."""
    sizes: list[int] = []
    for size in _LARGER_BLOCKS:
        while rows >= size and _gives_same_bits(size, weight, bias, product):
            sizes.append(size)
            rows -= size
    return sizes + [_BLOCK_ROWS] * (rows // _BLOCK_ROWS)


def _gives_same_bits(size: int, weight: Tensor, bias: Tensor | None, product: Product) -> bool:
    """Return whether a product of ``size`` rows is bitwise equal to the product on blocks of 16; tested at first use.

    The kernel depends on sizes and layout, not on values, and another order of additions changes some of thousands of
    sums. A weight that shows no difference (one of zeros) proves nothing, and is tried again later.
    """
    layout = (weight.shape, weight.stride(), weight.dtype, weight.data_ptr() % 64, bias is None)
    key = (size, *layout, getattr(product, "__qualname__", ""))
    found = _may_replace.get(key)
    if found is not None:
        return found
    # A separate generator: the run's random numbers must not depend on which sizes have been probed.
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, weight.shape[1], generator=draw).to(weight.dtype)
    linear = torch.nn.functional.linear
    few = weight[:_PROBED_COLUMNS]
    block = x[:_BLOCK_ROWS]
    # Summed in the reverse order, the products of a usual weight differ in some bit. Where they do not, this weight
    # could not show another order of a larger kernel either.
    if linear(block, few).equal(linear(block.flip(1), few.flip(1))):
        tries = _failed_probes[key] = _failed_probes.get(key, 0) + 1
        if tries >= _PROBES_AT_MOST:
            _may_replace[key] = False
        return False
    blocks = zip(x.split(_BLOCK_ROWS), product(x, weight, bias).split(_BLOCK_ROWS), strict=True)
    _may_replace[key] = all(product(rows, weight, bias).equal(found) for rows, found in blocks)
    return _may_replace[key]
