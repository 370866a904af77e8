"""Attention with terms that torch's fused kernels lack: a cap of the logits, and sinks.

``flex_attention`` computes them on a GPU without the matrix of all pairs. Elsewhere, and with dropout, they are written
out for sequences of similar length at a time: that takes the memory of ``eager`` attention over these sequences.

Tests without a GPU run ``flex_attention`` uncompiled on a CPU, against the written-out form.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, BlockMask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """The terms that a model adds to attention.

    Attributes:
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: (H,) a further logit of each head, which takes weight and has no value.
    """

    softcap: float | None = None
    sinks: Tensor | None = None

    def __bool__(self) -> bool:
        return self.softcap is not None or self.sinks is not None

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the soft cap to the logits."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def flex_serves(query: Tensor, dropout: float) -> bool:
    """Whether ``flex_attention`` takes the device and has no dropout to draw."""
    return query.is_cuda and dropout == 0


def flex(query: Tensor, key: Tensor, value: Tensor, mask: "BlockMask", terms: Terms, scale: float | None) -> Tensor:
    """Attend where a block mask says: query (1, H, T, D), key (1, K, T, D), value (1, K, T, E) -> (1, H, T, E)."""
    return _flex_by(_compiled(), query, key, value, mask, terms, scale)


def _flex_by(
    kernel: Callable[..., tuple[Tensor, "AuxOutput"]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: "BlockMask",
    terms: Terms,
    scale: float | None,
) -> Tensor:
    def capped(score: Tensor, batch: Tensor, head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        return terms.capped(score)

    from torch.nn.attention.flex_attention import AuxRequest

    options = {"score_mod": capped} if terms.softcap is not None else {}
    out, found = kernel(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
        **options,
    )
    if terms.sinks is not None:
        # A sink adds exp(sink) to the sum of the exponentials, whose logarithm is lse.
        assert found.lse is not None
        out = out * torch.sigmoid(found.lse - terms.sinks.float().view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
    return out


@cache
def _compiled() -> Callable[..., tuple[Tensor, "AuxOutput"]]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    terms: Terms,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend where ``mask`` is true: query (b, H, T, D), key (b, K, T, D), value (b, K, T, E) -> (b, H, T, E).

    A query that sees nothing returns zero.
    """
    give_notice_of_memory(query.device.type)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = terms.capped((query @ key.transpose(-1, -2)) * scale).float()
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]].masked_fill(~mask, 0.0).to(value.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value


@cache
def give_notice_of_memory(device: str) -> None:
    """Log once that attention takes memory for all pairs of tokens."""
    logger.warning(
        "attention with a cap of its logits, or with sinks, is written out on %s: it takes memory for all pairs of "
        "tokens of a sequence and head. On a GPU flash-attn (a cap) or flex_attention (without dropout) takes less",
        device,
    )
