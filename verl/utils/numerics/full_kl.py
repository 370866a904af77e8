"""The exact KL divergence of two distributions over the vocabulary, a few rows of logits at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.utils.numerics.log_probs import rows_per_chunk, scaled_log_softmax


class _FullKL(torch.autograd.Function):
    """Keep both logits for the backward pass, which recomputes the probabilities of a chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float, chunk_size: int | None) -> Tensor:
        step = rows_per_chunk(logits, chunk_size)
        kl = torch.cat(
            [
                _terms(logits[at : at + step], ref_logits[at : at + step], temperature)[2]
                for at in range(0, max(1, len(logits)), step)
            ]
        )
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature = temperature
        ctx.step = step
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
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
    return probs, log_ratio, torch.einsum("nv,nv->n", probs, log_ratio)


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
