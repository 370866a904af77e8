"""Attention over packed sequences, registered with transformers as ``verl_varlen``.

A packed row holds several sequences end to end. flash-attn and torch's varlen kernel take the boundaries, if they
support the device and dtype. Otherwise neighbouring sequences of similar length are padded and share one batched SDPA
call. It needs no mask, because causal attention never looks at padding after a sequence. A cap of the logits, sinks,
windows and chunks are applied as the model asks for them; any other term is refused.

Works with transformers 5.16 to 5.19 (AttentionInterface and AttentionMaskInterface).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.errors import WrongInput
from verl.models.transformers.attention_terms import Terms, flex, flex_serves, written_out
from verl.models.transformers.forest_attention import forest_attention
from verl.models.transformers.names import PACKED
from verl.models.transformers.packed_sequences import PackedSequences, PaddedGroup
from verl.utils import ulysses
from verl.utils.numerics.autograd import Kept

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VARLEN_ATTENTION = PACKED


@dataclass(frozen=True)
class LocalMask:
    """The mask of a layer with local attention where rows are packed, or without padding.

    A token sees the last ``window`` tokens up to itself, or those of its own chunk: tokens from a multiple of ``chunk``
    in its sequence on.
    """

    window: int | None = None
    chunk: int | None = None


class _PadRows(torch.autograd.Function):
    """Scatter row i of (t, ...) to ``index[i]`` of a zero tensor (n, ...)."""

    @staticmethod
    def forward(ctx: Kept, rows: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None


class _UnpadContext(Kept, Protocol):
    size: int


class _UnpadRows(torch.autograd.Function):
    """Take the rows at ``index``, which has no duplicates."""

    @staticmethod
    def forward(ctx: _UnpadContext, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: _UnpadContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, index, grads[0]), None


def _as_batch(rows: Tensor, group: PaddedGroup) -> Tensor:
    """Extract a group from (T, H, D) as (count, H, length, D)."""
    rows = rows[group.start : group.stop]
    if group.index is not None:
        rows = _PadRows.apply(rows, group.index, group.count * group.length)  # type: ignore[no-untyped-call]
    return rows.view(group.count, group.length, *rows.shape[1:]).transpose(1, 2)


@cache
def _flash_attn_varlen() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@cache
def _torch_varlen() -> Callable[..., Tensor]:
    """Return torch's varlen attention; torch 2.11 has grouped heads by default, later versions by ``enable_gqa``."""
    from torch.nn.attention.varlen import varlen_attn

    kernel = cast(Callable[..., Tensor], varlen_attn)  # returns a pair only if the caller asks for more
    return partial(kernel, enable_gqa=True) if "enable_gqa" in inspect.signature(kernel).parameters else kernel


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    terms: Terms = Terms(),  # noqa: B008 (immutable)
) -> Tensor:
    """Attend causally within each sequence of a packed row: query (T, H, D), key and value (T, K, D) -> (T, H, D).

    Device, dtype and head size decide the kernel; torch's varlen kernel has no dropout, and takes multiples of 8. Only
    flash-attn has a cap of the logits, neither has sinks.
    """
    packed.is_read = True
    supported = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    flash = _flash_attn_varlen() if supported else None
    if terms and (flash is None or terms.sinks is not None or packed.prefixes):
        return _attention_with_terms(query, key, value, packed, scale, dropout, window, terms)
    if packed.prefixes:
        return forest_attention(query, key, value, packed, scale)
    if supported and (flash is not None or (dropout == 0 and query.shape[-1] % 8 == 0)):
        bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length)
        left = (window or 0) - 1
        width = value.shape[-1]
        if width < query.shape[-1]:  # the kernels need equal head dimensions of values and queries
            value = F.pad(value, (0, query.shape[-1] - width))
        if flash is not None:
            sides = (left, -1 if left < 0 else 0)
            cap = {} if terms.softcap is None else {"softcap": terms.softcap}
            padded: Tensor = flash(
                query,
                key,
                value,
                *bounds,
                dropout_p=dropout,
                softmax_scale=scale,
                causal=True,
                window_size=sides,
                **cap,
            )
            return padded[..., :width]
        return _torch_varlen()(query, key, value, *bounds, scale=scale, window_size=(left, 0))[..., :width]
    is_grouped = query.shape[1] != key.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        mask = None if window is None or length <= window else causal_mask(length, q.device, window)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scale, enable_gqa=is_grouped)

    return _by_groups(attend, query, key, value, packed)


def causal_mask(length: int, device: torch.device, window: int | None = None, chunk: int | None = None) -> Tensor:
    """Return the causal mask of a sequence, (length, length) of bool."""
    at = torch.arange(length, device=device)
    distance = at.unsqueeze(1) - at.unsqueeze(0)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if chunk is not None:
        mask &= (at // chunk).unsqueeze(1) == (at // chunk).unsqueeze(0)
    return mask


def _by_groups(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
) -> Tensor:
    """Attend within batches of sequences of similar length; causal attention never sees their padding."""
    outputs = []
    for group in packed.padded_groups:
        out = attend(*(_as_batch(each, group) for each in (query, key, value)))
        rows = out.transpose(1, 2).reshape(group.count * group.length, *query.shape[1:2], value.shape[2])
        if group.index is not None:
            rows = _UnpadRows.apply(rows, group.index)  # type: ignore[no-untyped-call]
        outputs.append(rows)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float | None,
    dropout: float,
    window: int | None,
    terms: Terms,
) -> Tensor:
    parts = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    if flex_serves(query, dropout):
        return flex(*parts, packed.block_mask(window), terms, scale)[0].transpose(0, 1)
    if packed.prefixes:
        at = torch.arange(len(query), device=query.device)
        sees = (at[None] <= at[:, None]) & (at[:, None] < packed.visible_until[None])  # (query, key)
        return written_out(*parts, sees, terms, scale, dropout)[0].transpose(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return written_out(q, k, v, causal_mask(q.shape[2], q.device, window), terms, scale, dropout)

    return _by_groups(attend, query, key, value, packed)


def varlen_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row; without ``packed_sequences`` in each padded row.

    Padded rows use ``sdpa``, and attention written out where ``sdpa`` drops a term.

    Args: query (1, H, T, D), key and value (1, K, T, D); with Ulysses, T is this rank's slice. ``softcap`` and
        ``s_aux`` (H,) are transformers' names of the cap of the logits and of the sinks.
    Returns: (1, T, H, D).
    Raises: WrongInput for an option that packed rows do not support.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    terms = Terms(softcap, s_aux)
    if packed_sequences is None or not causal:
        return _unpacked_attention(module, query, key, value, attention_mask, scaling, dropout, causal, terms, kwargs)
    local = attention_mask if isinstance(attention_mask, LocalMask) else LocalMask()
    # Packed rows come without another mask: if there is one, the model has made it, as Doge does.
    given = kwargs | {"attention_mask": None if isinstance(attention_mask, LocalMask) else attention_mask}
    for name in ("position_bias", "attention_mask", "indices", "block_indices"):
        if given.get(name) is not None:
            raise WrongInput(
                f"packed attention does not support {name!r} of {type(module).__name__}: "
                "set model.use_remove_padding=False"
            )
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    sp_size = ulysses.get_ulysses_sequence_parallel_world_size()
    if sp_size > 1:
        if k.shape[1] < sp_size:
            k, v = (t.repeat_interleave(sp_size // t.shape[1], dim=1) for t in (k, v))
        q, k, v = (ulysses.gather_seq_scatter_heads(t, seq_dim=0, head_dim=1) for t in (q, k, v))
        if s_aux is not None:
            terms = Terms(softcap, s_aux.chunk(sp_size)[ulysses.get_ulysses_sequence_parallel_rank()])
    packed_sequences.is_read = True
    sequences = packed_sequences if local.chunk is None else packed_sequences.in_chunks(local.chunk)
    window = local.window if sliding_window is None else sliding_window
    out = packed_attention(q, k, v, sequences, scaling, dropout, window, terms)
    if sp_size > 1:
        out = ulysses.gather_heads_scatter_seq(out, head_dim=1, seq_dim=0)
    return out.unsqueeze(0), None


def _unpacked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LocalMask | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    terms: Terms,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Run transformers' ``sdpa`` or, where ``sdpa`` drops a term, attention written out with that term."""
    length = query.shape[2]
    if isinstance(attention_mask, LocalMask):
        attention_mask = causal_mask(length, query.device, attention_mask.window, attention_mask.chunk)[None, None]
    if terms:
        mask = attention_mask
        if mask is None:
            mask = causal_mask(length, query.device)[None, None] if causal else query.new_ones(1, dtype=torch.bool)
        return written_out(query, key, value, mask, terms, scaling, dropout).transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **options
    )
    return found


def _varlen_mask(
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: "PretrainedConfig | None" = None,
    **kwargs: Any,
) -> Tensor | LocalMask | None:
    """Return sdpa's mask for padded rows; else the window of a local layer, and None for a global layer.

    transformers passes the width of a window or of a chunk as ``local_size``.
    """
    if attention_mask is None and not kwargs.get("q_offset"):
        if local_size is None:
            return None
        chunked = local_size != getattr(config, "sliding_window", None)
        return LocalMask(chunk=local_size) if chunked else LocalMask(window=local_size)
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(attention_mask=attention_mask, local_size=local_size, config=config, **kwargs)


@cache
def register_varlen_attention() -> None:
    """Register ``attn_implementation="verl_varlen"`` with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _varlen_mask)
