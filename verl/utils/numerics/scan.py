"""Linear recursions over time without a Python loop over tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 32
_WHOLE = 0x0101010101010101 * (_CHUNK // 8)
_MOSTLY_CUT = 0.3


def reverse_scan(x: Tensor, keep: Tensor, decay: float) -> Tensor:
    """Solve ``y[t] = x[t] + d[t] * y[t + 1]`` from the end, where d is ``decay`` inside the mask and 1 outside.

    Plain form::

        for t in reversed(range(T)):
            y[:, t] = x[:, t] + where(keep[:, t], decay, 1) * y[:, t + 1]

    Time is divided into chunks. In a chunk that the mask keeps whole, the solution is one product with a triangular
    matrix of powers; chunks that the mask keeps in part are solved step by step, all of them at once. The contribution
    of the following chunk is added at the end. The error is a few units in the last place of the largest sum, as for
    the loop.

    Args: x is (B, T), zero outside the boolean mask ``keep`` (B, T).
    Returns: y (B, T), right where the mask is on and at the position after; elsewhere it may be anything.
    """
    batch_size, width = x.shape
    if width % _CHUNK:
        missing = _CHUNK - width % _CHUNK
        return reverse_scan(F.pad(x, (0, missing)), F.pad(keep, (0, missing)), decay)[:, :width]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    chunks = x.reshape(-1, _CHUNK)
    kept = keep.reshape(-1, _CHUNK).contiguous()
    y = out.view(-1, _CHUNK)
    # Eight booleans are read as one integer, and no byte of the sum of a chunk's integers overflows.
    count = kept.view(torch.int64).sum(dim=-1)
    whole = count == _WHOLE
    cut = ((count != 0) & ~whole).nonzero().squeeze(-1)
    if len(cut) > _MOSTLY_CUT * len(chunks):
        local, reach = _step_by_step(chunks, kept, decay)
        _, following = _join(local[0], reach[0], batch_size)
        y.copy_(local.addcmul_(reach, following).t())
        return out
    powers = torch.tensor([decay**i for i in range(_CHUNK + 1)], dtype=x.dtype, device=x.device)
    position = torch.arange(_CHUNK, device=x.device)
    lower = powers[(position.unsqueeze(1) - position).clamp(min=0)].tril()  # powers[i - j] on and below the diagonal
    torch.mm(chunks, lower, out=y)
    local, reach = _step_by_step(chunks[cut], kept[cut], decay)
    through = torch.where(whole, powers[-1], 1.0)
    y[cut, 0] = local[0]
    through[cut] = reach[0]
    # Until here each chunk is solved as if nothing followed. The y after a chunk reaches its position i with the weight
    # of the positions between them, decay ** (K - i) where the mask keeps all.
    starts, following = _join(y[:, 0], through, batch_size)
    y.addcmul_(following.unsqueeze(-1), powers[1:].flip(0))
    y[cut] = local.addcmul_(reach, following[cut]).t()
    y[:, 0] = starts
    return out


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of zeros and ones as a new tensor of a type; bytes convert far faster than booleans."""
    numbers = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return numbers.to(dtype, copy=True)


def _step_by_step(chunks: Tensor, kept: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Solve (N, K) chunks as if y were zero after each chunk.

    Returns: the solution, and the weight at each position of the first y after the chunk, both (K, N).
    """
    step = chunks.new_tensor(decay) - 1
    reach = as_numbers(kept.t().contiguous(), chunks.dtype).mul_(step).add_(1)
    return _recur_(chunks.t().contiguous(), reach)


def _recur_(y: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Solve ``y[t] += reach[t] * y[t + 1]`` over (K, N) from the end, in place; ``reach`` becomes its products."""
    steps = list(zip(y.unbind(), reach.unbind(), strict=True))
    for (y_t, reach_t), (y_next, reach_next) in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        y_t.addcmul_(reach_t, y_next)
        reach_t.mul_(reach_next)
    return y, reach


def _join(first: Tensor, through: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Solve from chunk to chunk.

    Args: for each chunk, row after row, (N,): the local solution at its first position, and the weight there of the
        first y after the chunk.
    Returns: the solution at the first position of each chunk, and of the chunk after it, both (N,).
    """
    first, through = (x.reshape(batch_size, -1).t().contiguous() for x in (first, through))
    starts = _recur_(first, through)[0].t()
    return starts.reshape(-1), F.pad(starts[:, 1:], (0, 1)).reshape(-1)
