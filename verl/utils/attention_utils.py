"""Removal and restoration of padding, by indexing that every device supports."""

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Return rows ``indices`` of the first axis."""
    return x.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Gather the tokens of (B, L, ...) that a (B, L) mask keeps.

    ``unused_mask`` marks positions to keep although they are not attended.

    Returns: the tokens (T, ...), their positions in (B * L), int32 offsets (B + 1,) of the rows, the length of the
    longest row, and the number of attended tokens per row (B,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    attended = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, int(lengths.max()), attended


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Scatter tokens (T, ...) to their positions in (B, L, ...); all other positions are zero."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def rearrange(tensor: Tensor, pattern: str, **axes_lengths: int) -> Tensor:
    """Reorder axes by an einops pattern; this needs the package einops."""
    import einops

    return einops.rearrange(tensor, pattern, **axes_lengths)
