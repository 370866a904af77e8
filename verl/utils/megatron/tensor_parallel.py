"""Log-probabilities and entropies of logits with a sharded vocabulary, without a second copy of the logits."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from verl.utils.import_utils import lazy_exports
from verl.utils.numerics.autograd import Kept
from verl.utils.numerics.log_probs import chunk_elements
from verl.utils.seqlen_balancing import ceildiv, roundup_divisible

_FOR_FORKS = (
    "vocab_parallel_log_probs_from_logits",
    "vocab_parallel_entropy",
    "vocab_parallel_log_probs_from_logits_response_rmpad",
    "is_tensor_parallel_param",
    "get_tensor_parallel_partition_dim",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.tensor_parallel"))


def vocab_range(vocab_size: int, group: ProcessGroup | None) -> tuple[int, int]:
    """Return the first token id of this rank's shard of the vocabulary, and the one after its last.

    Padding columns, which make the shards equal, are not counted.
    """
    rank = dist.get_rank(group) if group is not None else 0
    width = ceildiv(vocab_size, _size(group))
    return min(rank * width, vocab_size), min((rank + 1) * width, vocab_size)


def padded_vocab_size(vocab_size: int, size: int) -> int:
    """Return the vocabulary size padded to equal shards over ``size`` ranks."""
    return roundup_divisible(vocab_size, size)


def _size(group: ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None else 1


def _reduce(values: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if _size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


class _KeptOfVocab(Kept, Protocol):
    temperature: float
    width: int
    step: int
    inplace: bool
    with_entropy: bool


class _VocabParallel(torch.autograd.Function):
    """Compute log-probabilities and entropies from this rank's columns.

    ``sum exp(z)``, ``sum z exp(z)`` and the logit of the label are sums over columns, so that one all-reduce of three
    numbers per row joins the ranks. The backward pass recomputes the probabilities of a chunk from the kept logits and
    the joint log-sum, and needs no communication.
    """

    @staticmethod
    def forward(
        ctx: _KeptOfVocab,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        entropy_mode: str,
        vocab_size: int,
        group: ProcessGroup | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        first, last = vocab_range(vocab_size, group)
        rows = len(logits)
        width = last - first
        step = max(1, chunk_elements(logits) // max(width, 1))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = logits.new_full((rows,), -torch.inf, dtype=dtype)
        if width and rows:
            largest = logits[:, :width].amax(-1).to(dtype).div_(temperature)
        # All ranks shift by the same number: their sums of exponentials can be added, and no exponential exceeds 1.
        _reduce(largest, group, dist.ReduceOp.MAX)
        mine = (labels >= first) & (labels < last)
        # A label in another rank's columns reads column 0 here and counts as zero, so the sum over ranks is its logit.
        column = torch.where(mine, labels - first, 0)
        # Rows: sum of exp(z), sum of z exp(z), z of the label; z is shifted by the largest logit of its row.
        sums = logits.new_zeros(3, rows, dtype=dtype)
        for at in range(0, rows if width else 0, step):
            chunk = slice(at, at + step)
            shifted = logits[chunk, :width].to(dtype) / temperature
            shifted.sub_(largest[chunk].unsqueeze(-1))
            sums[2, chunk] = shifted.gather(-1, column[chunk].unsqueeze(-1)).squeeze(-1) * mine[chunk]
            if entropy_mode == "none":
                sums[0, chunk] = shifted.exp_().sum(-1)
                continue
            exponential = shifted.exp()
            sums[0, chunk] = exponential.sum(-1)
            # The clamp keeps masked logits from 0 * -inf, which is NaN.
            sums[1, chunk] = exponential.mul_(shifted.clamp_(min=-1e4)).sum(-1)
        _reduce(sums, group)
        log_sum = sums[0].log()
        log_probs = sums[2] - log_sum
        entropy = log_sum - sums[1] / sums[0] if entropy_mode != "none" else log_sum.new_empty(0)
        ctx.save_for_backward(logits, column, mine, largest + log_sum, entropy)
        ctx.temperature = temperature
        ctx.width = width
        ctx.step = step
        ctx.inplace = inplace
        ctx.with_entropy = entropy_mode == "grad"
        if not ctx.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptOfVocab, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, mine, log_sum, entropy = ctx.saved_tensors
        width = ctx.width
        temperature = ctx.temperature
        grad_logits = logits if ctx.inplace else torch.empty_like(logits)
        for at in range(0, len(logits) if width else 0, ctx.step):
            chunk = slice(at, at + ctx.step)
            log_p = logits[chunk, :width].to(log_sum.dtype) / temperature - log_sum[chunk].unsqueeze(-1)
            probs = log_p.exp()
            # d log p_y / dz = onehot(y) - p, and dH / dz = -p (log p + H): both have the factor p, and the one-hot part
            # is added last, by the rank that holds the label.
            pull = grad_log_probs[chunk].unsqueeze(-1)
            if ctx.with_entropy:
                surprise = log_p.clamp_(min=-1e4).add_(entropy[chunk].unsqueeze(-1))
                pull = surprise.mul_(grad_entropy[chunk].unsqueeze(-1)).add_(pull)
            grad = probs.mul_(pull).neg_()
            grad.scatter_add_(-1, column[chunk].unsqueeze(-1), (grad_log_probs[chunk] * mine[chunk]).unsqueeze(-1))
            grad_logits[chunk, :width] = grad.div_(temperature)
        grad_logits[:, width:] = 0
        return grad_logits, None, None, None, None, None, None


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    entropy: str = "none",
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    inplace_backward: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label and, on request, the entropy of its distribution.

    Rows are processed in chunks; two small collectives serve all of them. The gradient overwrites the logits, unless
    ``inplace_backward`` is off or they are a leaf.

    Args:
        logits: (N, V / ranks), this rank's columns of the vocabulary, padded to equal width.
        labels: (N,), int64, the same on every rank of ``group``.
        entropy: ``none``, ``value`` (without gradient) or ``grad``.
        vocab_size: tokens without padding; by default all columns are tokens.
        group: the ranks that hold the other columns; None if this rank holds all.
    Returns: (log_probs, entropy or None), each (N,) in fp32, float64 for float64 logits.
    Raises: ValueError for mismatched shapes, an unknown ``entropy`` or a temperature that is not positive.
    """
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy must be 'none', 'value' or 'grad', got {entropy!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    size = _size(group)
    total = logits.shape[-1] * size if vocab_size is None else vocab_size
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or logits.shape[-1] * size < total:
        raise ValueError(
            f"logits {tuple(logits.shape)} over {size} ranks and labels {tuple(labels.shape)} must be (N, V / ranks) "
            f"and (N,), with {total} tokens"
        )
    if logits.shape[-1] * size != padded_vocab_size(total, size):
        raise ValueError(f"logits of width {logits.shape[-1]} are not equal shards of {total} tokens over {size} ranks")
    log_probs, entropies = _VocabParallel.apply(  # type: ignore[no-untyped-call]
        logits, labels, float(temperature), entropy, total, group, inplace_backward and not logits.is_leaf
    )
    return log_probs, None if entropy == "none" else entropies
