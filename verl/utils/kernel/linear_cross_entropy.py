"""Log-probabilities and entropies from hidden states and the weight of the head, without the whole logits in memory.

The forward pass computes the logits of a chunk of rows, keeps four numbers of each row and drops the logits. The
backward pass computes them again, a block of the vocabulary at a time. So each part of the weight's gradient is one
product, and only the gradient of the hidden states, which is small, is summed over blocks, in fp32 or better.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from verl.utils.kernel.rows import Backend, HeadFormula, RowGrads, Rows, RowSums, rebase
from verl.utils.numerics.autograd import Kept

CHUNK_ROWS = 512
ENTROPY_MODES = ("none", "value", "grad")


def backend_of(name: str, device: torch.device) -> Backend:
    """Return the backend of a name.

    Raises: ValueError for an unknown name, and for ``triton`` if it cannot run here.
    """
    if name == "torch":
        return Backend()
    if name != "triton":
        raise ValueError(f"the backend of a fused head is one of torch, triton, got {name!r}")
    try:
        from verl.utils.kernel.kernels import TritonBackend, is_interpreted
    except ImportError:
        raise ValueError("impl_backend=triton needs the package triton: install it or write torch") from None
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(f"impl_backend=triton needs a CUDA device, this one is {device.type}: write torch")
    return TritonBackend()


def _over_ranks(sums: RowSums, group: ProcessGroup | None) -> RowSums:
    """Return the sums over the parts of the vocabulary of all ranks."""
    if group is None or dist.get_world_size(group) == 1:
        return sums
    largest = sums.largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    parts = torch.stack(rebase(sums, largest))
    dist.all_reduce(parts, group=group)
    return RowSums(largest, *parts.unbind())


class _KeptOfLogProbs(Kept, Protocol):
    formula: HeadFormula
    backend: Backend
    chunk_rows: int
    with_entropy: bool


class _LinearLogProbs(torch.autograd.Function):
    """Keep the inputs and two numbers of each row for the backward pass."""

    @staticmethod
    def forward(
        ctx: _KeptOfLogProbs,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        formula: HeadFormula,
        entropy_mode: str,
        backend: Backend,
        chunk_rows: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows = Rows(hidden, weight, bias, labels)
        sums = _over_ranks(backend.row_sums(rows, formula, entropy_mode != "none", chunk_rows), group)
        log_total = sums.total.log()
        log_probs = sums.label - sums.largest - log_total
        entropy = log_total - sums.weighted / sums.total if entropy_mode != "none" else log_total.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, labels, sums.largest + log_total, entropy)
        ctx.formula = formula
        ctx.backend = backend
        ctx.chunk_rows = chunk_rows
        ctx.with_entropy = entropy_mode == "grad"
        if not ctx.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptOfLogProbs, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum, entropy = ctx.saved_tensors
        rows = Rows(hidden, weight, bias, labels)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kept_entropy = entropy if ctx.with_entropy else None
        grads = RowGrads(log_sum, kept_entropy, grad_log_probs.contiguous(), grad_entropy.contiguous())
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for block in _blocks(len(hidden), ctx.formula.columns, ctx.chunk_rows):
            grad = ctx.backend.logits_gradient(rows, ctx.formula, block, grads)
            if grad_hidden is not None and grad_hidden.dtype == grad.dtype:
                grad_hidden.addmm_(grad, weight[block])
            elif grad_hidden is not None:
                grad_hidden.add_(grad @ weight[block])
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[block])
            if grad_bias is not None:
                grad_bias[block] = grad.sum(0)
        grad_hidden = grad_hidden.to(hidden.dtype) if grad_hidden is not None else None
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _blocks(rows: int, columns: int, chunk_rows: int) -> list[slice]:
    """Cut the vocabulary so that a block of all rows has the elements of a chunk of rows with all columns."""
    if not rows:
        return []
    width = max(1, chunk_rows * columns // rows)
    width = width if width < 64 else width // 64 * 64
    return [slice(at, min(at + width, columns)) for at in range(0, columns, width)]


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    formula: HeadFormula | None = None,
    *,
    bias: Tensor | None = None,
    entropy: str = "none",
    backend: str = "torch",
    chunk_rows: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label and, on request, the entropy of its distribution.

    At most ``chunk_rows`` x V logits exist at a time; the default depends on the device. Products are in the dtype of
    the inputs, sums in fp32 or better.

    Args:
        hidden: (N, H).
        weight: (V, H); with a ``group`` this rank's part of the vocabulary. The gradient of ``hidden`` then covers only
            this part; ``sum_gradients`` adds up the gradients of the ranks.
        labels: (N,) int64, rows of ``weight``; -1 for a row of another rank.
        entropy: ``none``, ``value`` (without gradient) or ``grad``.
        backend: ``torch``, or ``triton`` on CUDA.
        group: the ranks that hold the other parts.
    Returns: (log_probs, entropy or None), each (N,) in fp32, float64 for float64 inputs.
    Raises: ValueError for shapes that do not match, an unknown name, or a temperature that is not positive.
    """
    formula = (formula or HeadFormula()).of(weight)
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"entropy must be one of {', '.join(ENTROPY_MODES)}, got {entropy!r}")
    if chunk_rows is None:
        elements = 1 << 22 if hidden.device.type == "cpu" else 1 << 26
        chunk_rows = max(1, min(CHUNK_ROWS, elements // max(1, formula.columns)))
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden states {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} must "
            "be (N, H), (V, H) and (N,)"
        )
    log_probs, entropies = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, formula, entropy, backend_of(backend, hidden.device), chunk_rows, group
    )
    return log_probs, None if entropy == "none" else entropies


class _KeptOfSum(Kept, Protocol):
    group: ProcessGroup


class _SumGradients(torch.autograd.Function):
    """The identity, whose backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: _KeptOfSum, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptOfSum, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_gradients(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return ``hidden``, which all ranks of a group have, so that its gradient is the sum of theirs."""
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    summed: Tensor = _SumGradients.apply(hidden, group)  # type: ignore[no-untyped-call]
    return summed


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log_probs, entropy) of labels (...) from hidden states (..., H), by Triton on CUDA and torch elsewhere.

    With a group each rank holds equal parts (V / ranks, H) of the weight, in order, all have the same hidden states
    and whole labels, and the gradient of the hidden states is summed over them. ``reduction``: ``none``, ``mean`` or
    ``sum`` of the log-probabilities.

    Raises: ValueError for another reduction, or shapes that do not match.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction must be none, mean or sum, got {reduction!r}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = labels.reshape(-1)
    if dist_process_group is not None:
        rows = sum_gradients(rows, dist_process_group)
        column = flat - dist.get_rank(dist_process_group) * len(weight)
        flat = torch.where((column >= 0) & (column < len(weight)), column, -1)
    log_probs, entropy = linear_log_probs_and_entropy(
        rows,
        weight,
        flat,
        HeadFormula(temperature=temperature),
        entropy="grad",
        backend="triton" if hidden.device.type == "cuda" else "torch",
        group=dist_process_group,
    )
    assert entropy is not None
    log_probs = log_probs.view(labels.shape)
    return {"none": log_probs, "mean": log_probs.mean(), "sum": log_probs.sum()}[reduction], entropy.view(labels.shape)
