"""The last linear layer fused with log-probabilities and entropy."""

from torch import Tensor, nn

from verl.utils.kernel.linear_cross_entropy import CHUNK_ROWS, linear_log_probs_and_entropy
from verl.utils.kernel.rows import HeadFormula


class FusedLinearForPPO(nn.Module):
    """Compute log-probabilities and entropies from hidden states, holding at most one chunk of logits."""

    def __init__(self, chunk_size: int = CHUNK_ROWS) -> None:
        super().__init__()
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (log_probs, entropy), each (...) in fp32 (float64 for float64 inputs).

        Args: hidden states (..., H), weights (V, H), labels ``input_ids`` (...), already shifted by the caller.
        Raises: ValueError when the shapes do not match.
        """
        if hidden_states.shape[:-1] != input_ids.shape:
            raise ValueError(
                f"input_ids {tuple(input_ids.shape)} must have the shape of hidden_states "
                f"{tuple(hidden_states.shape)} without the last dim"
            )
        log_probs, entropy = linear_log_probs_and_entropy(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            vocab_weights,
            input_ids.reshape(-1),
            HeadFormula(temperature=float(temperature)),
            entropy="grad",
            chunk_rows=self.chunk_size,
        )
        assert entropy is not None
        return log_probs.view(input_ids.shape), entropy.view(input_ids.shape)
