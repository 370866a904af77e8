"""Log-probabilities and entropies of sampled tokens, and the exact KL, without a second copy of the logits."""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.utils.numerics.autograd import Kept

LOG_ZERO = -1e4
"""Stands for a log-probability of minus infinity; its exponential is zero in every dtype."""


def chunk_elements(logits: Tensor) -> int:
    """Return the default number of logits in a chunk: small enough for a CPU's cache, large enough to fill a GPU."""
    return 1 << 20 if logits.device.type == "cpu" else 1 << 25


def rows_per_chunk(logits: Tensor, chunk_size: int | None) -> int:
    """Return the number of rows in a chunk."""
    return max(1, chunk_size or chunk_elements(logits) // logits.shape[-1])


def scaled_log_softmax(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Return ``log_softmax(logits / temperature)`` of (N, V) rows, in fp32 or better."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(temperature, float) and temperature == 1.0:
        return torch.log_softmax(logits, dim=-1, dtype=dtype)
    return torch.log_softmax(logits.to(dtype) / temperature, dim=-1)


class _KeptOfLogProbs(Kept, Protocol):
    temperature: Tensor | float
    entropy_mode: str
    step: int
    inplace: bool


class _LogProbsAndEntropy(torch.autograd.Function):
    """Keep the logits for the backward pass, and overwrite them with their gradient there.

    Per row with probabilities p and entropy H: d log p(label) / dz = onehot - p, and dH / dz = -p (log p + H).
    Keeping p as well would double the memory of the largest tensor of a training step.
    """

    @staticmethod
    def forward(
        ctx: _KeptOfLogProbs,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor | float,
        entropy_mode: str,
        chunk_size: int | None,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = len(logits)
        step = rows_per_chunk(logits, chunk_size)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs = logits.new_empty(rows, dtype=dtype)
        entropy = logits.new_empty(rows if entropy_mode != "none" else 0, dtype=dtype)
        for at in range(0, rows, step):
            chunk = slice(at, at + step)
            log_p = scaled_log_softmax(logits[chunk], _of_rows(temperature, chunk))
            log_probs[chunk] = log_p.gather(-1, labels[chunk].unsqueeze(-1)).squeeze(-1)
            if entropy_mode != "none":
                entropy[chunk] = log_p.exp().mul_(log_p.clamp_(min=LOG_ZERO)).sum(dim=-1).neg_()
        ctx.save_for_backward(logits, labels, entropy)
        ctx.temperature = temperature
        ctx.entropy_mode = entropy_mode
        ctx.step = step
        ctx.inplace = inplace
        if entropy_mode != "grad":
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptOfLogProbs, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, entropy = ctx.saved_tensors
        grad_logits = logits if ctx.inplace else torch.empty_like(logits)
        with_entropy = ctx.entropy_mode == "grad"
        for at in range(0, len(logits), ctx.step):
            chunk = slice(at, at + ctx.step)
            temperature = _of_rows(ctx.temperature, chunk)
            log_p = scaled_log_softmax(logits[chunk], temperature)
            probs = log_p.exp()
            of_label = grad_log_probs[chunk].to(probs.dtype).unsqueeze(-1)
            if with_entropy:
                pull = log_p.clamp_(min=LOG_ZERO).add_(entropy[chunk].unsqueeze(-1))
                pull.mul_(grad_entropy[chunk].to(probs.dtype).unsqueeze(-1)).add_(of_label)
                grad = probs.mul_(pull).neg_()
            else:
                grad = probs.mul_(-of_label)
            # The one-hot part touches one column of a row, so it is added last and no (n, V) tensor is made for it.
            grad.scatter_add_(-1, labels[chunk].unsqueeze(-1), of_label)
            is_one = isinstance(temperature, float) and temperature == 1.0
            grad_logits[chunk] = grad if is_one else grad.div_(temperature)
        return grad_logits, None, None, None, None, None


def _of_rows(temperature: Tensor | float, chunk: slice) -> Tensor | float:
    return temperature[chunk] if isinstance(temperature, Tensor) else temperature


def _row_temperature(temperature: Tensor | float, shape: torch.Size) -> Tensor | float:
    """Return a plain number, or one temperature for each row of the flattened logits: (N, 1)."""
    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        return temperature.expand(shape).reshape(-1, 1)
    value = float(temperature)
    if not value > 0:
        raise ValueError(f"temperature must be positive, got {value}")
    return value


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    entropy: str | bool = "none",
    chunk_size: int | None = None,
    inplace_backward: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label and, on request, the entropy of its distribution.

    Rows are processed in chunks, and no second tensor of the size of the logits is allocated: the backward pass
    recomputes the probabilities of a chunk and overwrites the logits with the gradient. Use ``inplace_backward=False``
    if another backward pass needs the logits (autograd raises otherwise). Leaves are never overwritten.

    Args:
        logits: (..., V), any floating dtype; half precision is computed in fp32.
        labels: (...), int64.
        temperature: a number, or a tensor that broadcasts to the shape of the labels.
        entropy: ``none``, ``value`` (without gradient) or ``grad``; True is ``value``.
        chunk_size: rows per chunk; the default depends on the device.
    Returns: (log_probs, entropy or None), each (...) in fp32, float64 for float64 logits.
    Raises: ValueError for mismatched shapes, an unknown ``entropy`` or a temperature that is not positive.
    """
    mode = ("value" if entropy else "none") if isinstance(entropy, bool) else entropy
    if mode not in ("none", "value", "grad"):
        raise ValueError(f"entropy must be 'none', 'value' or 'grad', got {entropy!r}")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of logits {tuple(logits.shape)} without the last dim"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    inplace = inplace_backward and not logits.is_leaf
    log_probs, entropies = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        rows, labels.reshape(-1), _row_temperature(temperature, labels.shape), mode, chunk_size, inplace
    )
    return log_probs.view(labels.shape), None if mode == "none" else entropies.view(labels.shape)


# ---- the KL divergence of two distributions over the vocabulary


class _KeptKL(Kept, Protocol):
    temperature: float
    step: int


class _FullKL(torch.autograd.Function):
    """Keep both logits for the backward pass, which recomputes the probabilities of a chunk."""

    @staticmethod
    def forward(ctx: _KeptKL, logits: Tensor, ref_logits: Tensor, temperature: float, chunk_size: int | None) -> Tensor:
        step = rows_per_chunk(logits, chunk_size)
        starts = range(0, max(1, len(logits)), step)
        kl = torch.cat([_terms(logits[at : at + step], ref_logits[at : at + step], temperature)[2] for at in starts])
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature = temperature
        ctx.step = step
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: _KeptKL, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ref_logits, kl = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for at in range(0, len(logits), ctx.step):
            chunk = slice(at, at + ctx.step)
            probs, log_ratio, _ = _terms(logits[chunk], ref_logits[chunk], ctx.temperature)
            slope = probs.mul_(log_ratio.sub_(kl[chunk].unsqueeze(-1)))
            grad_logits[chunk] = slope.mul_((grad[chunk] / ctx.temperature).unsqueeze(-1))
        return grad_logits, None, None, None


def _terms(logits: Tensor, ref_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities (n, V), the log-ratios to the reference (0 at probability 0) and the KL (n,)."""
    log_probs = scaled_log_softmax(logits, temperature)
    probs = log_probs.exp()
    log_ratio = log_probs.sub_(scaled_log_softmax(ref_logits, temperature)).masked_fill_(probs == 0, 0.0)
    return probs, log_ratio, (probs * log_ratio).sum(-1)


def full_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """Return sum_v p(v) (log p(v) - log q(v)) of each row: (N,) from logits of p and q, (N, V), in fp32 or better.

    Both are divided by the temperature. Only the first receives a gradient.

    Raises: ValueError when the shapes differ, for instance because the vocabularies do.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"the full KL compares distributions over one vocabulary: logits {tuple(logits.shape)} of the policy, "
            f"{tuple(ref_logits.shape)} of the reference; set another actor_rollout_ref.actor.kl_loss_type"
        )
    kl: Tensor = _FullKL.apply(logits, ref_logits.detach(), float(temperature), chunk_size)  # type: ignore[no-untyped-call]
    return kl
