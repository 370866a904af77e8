"""The last linear layer fused with what a policy loss needs of its logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl.utils.log_probs import entropy_of, logits_gradient, scaled_log_softmax


class _FusedLinear(torch.autograd.Function):
    """Makes the logits of a chunk of rows, uses them and lets them go; makes them again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = torch.empty_like(log_probs)
        for at in range(0, len(hidden), chunk_size):
            chunk = slice(at, at + chunk_size)
            log_p = scaled_log_softmax(hidden[chunk] @ weight.t(), temperature)
            log_probs[chunk] = log_p.gather(-1, labels[chunk].unsqueeze(-1)).squeeze(-1)
            entropy[chunk] = entropy_of(log_p)
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, entropy = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # The sum over chunks is kept in fp32: half precision would lose the small contributions.
        grad_weight = torch.zeros_like(weight, dtype=grad_log_probs.dtype) if needs_weight else None
        for at in range(0, len(hidden), ctx.chunk_size):
            chunk = slice(at, at + ctx.chunk_size)
            grad_logits = logits_gradient(
                hidden[chunk] @ weight.t(),
                labels[chunk],
                ctx.temperature,
                entropy[chunk],
                grad_log_probs[chunk],
                grad_entropy[chunk],
            ).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies straight from hidden states; holds at most a chunk of logits."""

    def __init__(self, chunk_size: int = 512) -> None:
        super().__init__()
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (log_probs, entropy), each (...) in fp32 (float64 for float64 inputs).

        Args: hidden states (..., H), weights (V, H), the labels to score (...). ``input_ids`` are labels: the caller
            has shifted them.
        Raises: ValueError when the shapes do not match.
        """
        if hidden_states.shape[:-1] != input_ids.shape:
            raise ValueError(
                f"input_ids {tuple(input_ids.shape)} must have the shape of hidden_states "
                f"{tuple(hidden_states.shape)} less the last"
            )
        log_probs, entropy = _FusedLinear.apply(  # type: ignore[no-untyped-call]
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            vocab_weights,
            input_ids.reshape(-1),
            float(temperature),
            self.chunk_size,
        )
        return log_probs.view(input_ids.shape), entropy.view(input_ids.shape)
