"""The entropy of distributions over the vocabulary, in chunks that stay in the cache."""

import itertools
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.numerics.autograd import Kept
from verl.utils.numerics.host_memory import empty_like
from verl.utils.numerics.log_probs import LOG_ZERO, rows_per_chunk

_LOG2_E = 1 / math.log(2)
_CPU_CHUNK_ELEMENTS = 1 << 17
"""Three buffers of this many fp32 numbers (logits, exponents or gradient, exponentials) take 1.5 MB, about as much as
the L2 cache of a core."""


def plain_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution by log_softmax, the plain form: (...) from logits (..., V)."""
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -(log_probs.exp() * log_probs.clamp(min=LOG_ZERO)).sum(dim=-1)


class _KeptOfEntropy(Kept, Protocol):
    step: int
    unscaled: Tensor | None


class _Entropy(torch.autograd.Function):
    """Entropy as an autograd function; on a CPU the forward computes the gradient, elsewhere it keeps the logits.

    With d = (z - max z) / ln 2, s = sum 2^d and t = sum 2^d d over a row: H = ln 2 (log2 s - t / s), a sum of two terms
    that are not negative, and dH / dz = -p (log p + H) = -ln 2 / s * (2^d d - 2^d t / s). ``exp2`` takes a third of the
    time of ``exp``. d is one fused multiplication and addition.

    On a CPU the exponentials take longest, so the forward pass leaves 2^d d - 2^d t / s in the memory in which the
    backward pass returns the gradient, and computes d there as well. A second backward pass recomputes it. Elsewhere,
    and for logits of less precision than the entropy, the first one does.
    """

    @staticmethod
    def forward(ctx: _KeptOfEntropy, logits: Tensor, chunk_size: int | None, with_gradient: bool) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        step = _step(logits, chunk_size)
        entropy, offset, total, mean = (logits.new_empty(len(logits), 1, dtype=dtype) for _ in range(4))
        on_cpu = logits.device.type == "cpu"
        unscaled = empty_like(logits) if with_gradient and on_cpu and logits.dtype == dtype else None
        masked = not on_cpu  # an accelerator always clamps, because the check for NaN would wait for the device
        # On a CPU a masked logit (-inf) shows as NaN, and its rows are then computed again with clamping. A mask
        # usually hides the same tokens in every row, so the first chunk shows whether the others need it.
        for rows in (slice(0, step), slice(step, len(logits))):
            part = (logits[rows], offset[rows], total[rows], mean[rows], None if unscaled is None else unscaled[rows])
            _moments(*part, step, masked)
            if not masked and bool(mean[rows].isnan().any()):
                masked = True  # 0 * -inf
                _moments(*part, step, masked)
        torch.log2(total, out=entropy).sub_(mean).div_(_LOG2_E)
        ctx.save_for_backward(logits, offset, total, mean)
        ctx.step = step
        ctx.unscaled = unscaled
        return entropy.squeeze(-1)

    @staticmethod
    def backward(ctx: _KeptOfEntropy, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, offset, total, mean = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            log_probs = F.log_softmax(logits, dim=-1, dtype=grad.dtype)
            pull = log_probs.clamp(min=LOG_ZERO) + plain_entropy(logits).unsqueeze(-1)
            return -(grad.unsqueeze(-1) * log_probs.exp() * pull).to(logits.dtype), None, None
        dtype = grad.dtype
        scale = grad.unsqueeze(-1).div(total).div_(-_LOG2_E)
        if ctx.unscaled is not None:
            unscaled = ctx.unscaled
            ctx.unscaled = None
            return unscaled.mul_(scale), None, None
        grad_logits = empty_like(logits)
        chunk = (min(ctx.step, len(logits)), logits.shape[-1])
        exponents, exponentials = (logits.new_empty(chunk, dtype=dtype) for _ in range(2))
        for at in range(0, len(logits), ctx.step):
            part = slice(at, at + ctx.step)
            z = logits[part].to(dtype)
            d = exponents[: len(z)]
            e = exponentials[: len(z)]
            _exponents(z, offset[part], d)
            torch.exp2(d, out=e)
            d.mul_(e).addcmul_(e, mean[part], value=-1)
            torch.mul(d, scale[part], out=grad_logits[part] if logits.dtype == dtype else d)
            if logits.dtype != dtype:
                grad_logits[part] = d
        return grad_logits, None, None


def _moments(
    logits: Tensor, offset: Tensor, total: Tensor, mean: Tensor, unscaled: Tensor | None, step: int, masked: bool
) -> None:
    """Write -max z / ln 2, s and t / s of each row, and 2^d d - 2^d t / s where there is memory for it."""
    shape = (min(step, len(logits)), logits.shape[-1])
    dtype = total.dtype
    exponentials = logits.new_empty(shape, dtype=dtype)
    exponents = itertools.repeat(logits.new_empty(shape, dtype=dtype)) if unscaled is None else unscaled.split(step)
    parts = (logits.split(step), offset.split(step), total.split(step), mean.split(step), exponents)
    for z, shift, sum_e, mean_d, d in zip(*parts, strict=False):
        z = z.to(dtype)
        d = d[: len(z)]  # the last chunk may be smaller
        e = exponentials[: len(z)]
        torch.mul(z.amax(dim=-1, keepdim=True), -_LOG2_E, out=shift)
        _exponents(z, shift, d, masked)
        torch.exp2(d, out=e)
        torch.sum(e, dim=-1, keepdim=True, out=sum_e)
        torch.sum(d.mul_(e), dim=-1, keepdim=True, out=mean_d)
        mean_d.div_(sum_e)
        if unscaled is not None:
            d.addcmul_(e, mean_d, value=-1)


def _exponents(z: Tensor, offset: Tensor, out: Tensor, masked: bool = True) -> None:
    """Write z / ln 2 + offset; ``masked`` logits, minus infinity, become a number whose power is zero."""
    torch.add(offset, z, alpha=_LOG2_E, out=out)
    if masked:
        out.clamp_(min=LOG_ZERO)


def _step(logits: Tensor, chunk_size: int | None) -> int:
    """Return the number of rows in a chunk: as many as fit the cache of a CPU, at most ``chunk_size``."""
    step = rows_per_chunk(logits, chunk_size)
    return step if logits.device.type != "cpu" else max(1, min(step, _CPU_CHUNK_ELEMENTS // logits.shape[-1]))


def entropy(logits: Tensor, chunk_size: int | None = None) -> Tensor:
    """Return the entropy of each distribution: (...) from logits (..., V), in fp32 or better.

    Rows are processed in chunks of at most ``chunk_size``, and the only tensor of the size of the logits that is
    allocated is their gradient: on a CPU with the entropy, if logits require one, else in the backward pass. Equal to
    ``plain_entropy``, also where logits are minus infinity.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    with_gradient = torch.is_grad_enabled() and rows.requires_grad
    result: Tensor = _Entropy.apply(rows, chunk_size, with_gradient)  # type: ignore[no-untyped-call]
    return result.view(logits.shape[:-1])
