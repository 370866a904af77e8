"""Forward passes through a chunk of a ``GPTModel``, for callers that run Megatron-Core's schedules themselves."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from verl.models.mcore.gpt.build import attach_fused_head, attach_picker
from verl.models.mcore.gpt.layers import HeadRequest, packed_row_params
from verl.models.mcore.gpt.vision import MediaRequest, axial_positions, takes_axes
from verl.models.mcore.packing import aligned_lengths, held_places, local_places, places_of
from verl.models.transformers.vision import Media
from verl.utils.megatron.tensor_parallel import vocab_range
from verl.utils.megatron_utils import unwrap_model
from verl.utils.model import CausalLMOutputForPPO
from verl.utils.ulysses import all_gather_tensor

LogitsProcessor = Callable[..., dict[str, Tensor]]
"""(logits (1, t, V / ranks), keyword arguments (1, t)) -> tensors (1, t)."""


class _Row:
    """Sequences packed into one row, of which this context-parallel rank holds a part.

    Raises: ValueError for media or positions that the model does not take, or that it lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        lengths: list[int],
        device: torch.device,
        position_ids: Tensor | None = None,
        media: dict[str, Tensor] | None = None,
    ) -> None:
        inner = unwrap_model(model)
        if media and not takes_axes(inner):
            raise ValueError(f"multi_modal_inputs has {sorted(media)}, but this model reads text only")
        if media and position_ids is None:
            raise ValueError("multi_modal_inputs need position_ids: a model with images has positions along three axes")
        group = parallel_state.get_context_parallel_group()
        config = inner.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        aligned = aligned_lengths(lengths, group.size(), multiple)
        self.model = model
        self.inner = inner
        self.group = group
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.device = device
        self.total = sum(aligned)
        self.params = packed_row_params(aligned, device)
        self.place = places_of(lengths, aligned).to(device)
        self.held = held_places(aligned, group.size(), group.rank()).to(device)
        self.positions: Tensor | None = None
        if takes_axes(inner):
            if position_ids is None:  # text alone
                position_ids = torch.cat([torch.arange(length) for length in lengths]).to(device)
            self.positions = axial_positions(position_ids, self.place, self.total)
        self.media = media or {}
        self.local = local_places(lengths, aligned, group.size(), group.rank()).to(device)
        attach_picker(inner, self.tp_group)
        self.head = getattr(inner, "picker", None)

    def take(self, tokens: Tensor) -> Tensor:
        """Return this rank's part (t, ...) of the values of all tokens (T, ...)."""
        whole = tokens.new_zeros(self.total, *tokens.shape[1:])
        return whole.index_copy(0, self.place, tokens)[self.held]

    def spread(self, values: Tensor) -> Tensor:
        """Return the values of all tokens (T, ...) from the parts (t, ...) of all ranks; differentiable."""
        whole = values.new_zeros(self.total, *values.shape[1:]).index_copy(0, self.held, values)
        if self.group.size() > 1:  # each place is nonzero on one rank only
            whole = all_gather_tensor(whole.unsqueeze(0), 0, self.group).sum(0)
        return whole[self.place]

    def run(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return hidden states or, from the head, the output (1, t, ...) at the places ``keep`` of this rank's part."""
        if self.head is not None:
            self.head.keep = torch.arange(len(self.held), device=self.device) if keep is None else keep
        if hasattr(self.inner, "merger"):
            ids = tokens.unsqueeze(0)
            media = Media(torch.zeros_like(ids, dtype=torch.bool), self.media)
            self.inner.merger.request = MediaRequest(media, ids, self.local, self.params)
        return self.model(
            self.take(tokens).unsqueeze(0),
            position_ids=self.positions,
            attention_mask=None,
            packed_seq_params=self.params,
        )

    def outputs(
        self,
        tokens: Tensor,
        process: LogitsProcessor | None,
        arguments: dict[str, Tensor],
        vocab_size: int | None,
        as_rows: Callable[[Tensor], Tensor],
    ) -> Tensor | dict[str, Tensor]:
        """Run the tokens (T,); return hidden states or, from the head, its output or ``process`` of it ``as_rows``.

        ``arguments`` hold one value per token. ``vocab_size`` is None for a value model.
        """
        output = self.run(tokens)
        if self.head is None:
            return output
        if vocab_size is not None:
            output = _without_padding(output, vocab_size)
        if process is None:
            values = self.spread(output.squeeze(0))
            return as_rows(values[:, 0] if vocab_size is None else values)
        own = {name: self.take(value).unsqueeze(0) for name, value in arguments.items()}
        return {name: as_rows(self.spread(value.squeeze(0))) for name, value in process(output, **own).items()}


def _without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Set the logits of vocabulary padding to -inf."""
    first, last = vocab_range(vocab_size, parallel_state.get_tensor_model_parallel_group())
    width = last - first
    if width == logits.shape[-1]:
        return logits
    return torch.cat([logits[..., :width], torch.full_like(logits[..., width:], -torch.inf)], dim=-1)


def model_forward(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    multi_modal_inputs: dict[str, Tensor] | None = None,
    logits_processor: LogitsProcessor | None = None,
    logits_processor_args: dict[str, Tensor] | None = None,
    value_model: bool = False,
    *,
    vocab_size: int,
) -> Tensor | dict[str, Tensor]:
    """Run rows (B, L) without their padding; positions of a text model count the tokens of a row from 0.

    Args:
        position_ids: (3, B, L) or (4, B, L) for a vision-language model, whose last three rows are frame, row and
            column; a text model does not read them.
        multi_modal_inputs: the processor's tensors of all rows, in their order.

    Returns: on the last stage logits (B, L, V / ranks), values (B, L), or the outputs (B, L) of ``logits_processor``
    with its arguments (B, L), all zero at padding. On other stages hidden states.
    Raises: ValueError for images next to a text model, or without positions.
    """
    mask = attention_mask.bool()
    row = _Row(model, mask.sum(-1).tolist(), input_ids.device, _packed(position_ids, mask), multi_modal_inputs)
    arguments = {name: value[mask] for name, value in (logits_processor_args or {}).items()}

    def padded(values: Tensor) -> Tensor:
        rows = values.new_zeros(*mask.shape, *values.shape[1:])
        return rows.masked_scatter(mask.view(*mask.shape, *[1] * (values.dim() - 1)), values)

    return row.outputs(input_ids[mask], logits_processor, arguments, None if value_model else vocab_size, padded)


def model_forward_no_padding(
    model: nn.Module,
    input_ids: Tensor,
    multi_modal_inputs: dict[str, Tensor] | None = None,
    logits_processor: LogitsProcessor | None = None,
    logits_processor_args: dict[str, Tensor] | None = None,
    value_model: bool = False,
    *,
    vocab_size: int,
) -> Tensor | dict[str, Tensor]:
    """Run like ``model_forward`` with jagged nested tensors as input and output.

    It takes no positions, and so no images. Raises: ValueError for images.
    """
    offsets: Tensor = input_ids.offsets()  # type: ignore[attr-defined]  # torch has no type of nested tensors
    lengths: list[int] = offsets.diff().tolist()
    row = _Row(model, lengths, input_ids.device, media=multi_modal_inputs)
    arguments = {name: value.values() for name, value in (logits_processor_args or {}).items()}

    def nested(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    return row.outputs(input_ids.values(), logits_processor, arguments, None if value_model else vocab_size, nested)


def fused_forward(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor,
    labels: Tensor,
    labels_mask: Tensor,
    temperature: float = 1.0,
    multi_modal_inputs: dict[str, Tensor] | None = None,
    *,
    vocab_size: int,
) -> CausalLMOutputForPPO | Tensor:
    """Run rows (B, L) and score ``labels`` (B, L) where ``labels_mask`` (B, L) is set, with few logits at a time.

    See ``model_forward`` for ``position_ids`` and ``multi_modal_inputs``.

    Returns: on the last stage ``log_probs`` of the labels, each predicted at its own position, and ``entropy``, both
    (B, L) and zero outside the mask. On other stages hidden states.
    Raises: ValueError for images next to a text model, or without positions.
    """
    mask = attention_mask.bool()
    row = _Row(model, mask.sum(-1).tolist(), input_ids.device, _packed(position_ids, mask), multi_modal_inputs)
    asked = row.take(labels_mask.bool()[mask])
    keep = asked.nonzero().squeeze(-1)
    some = keep if len(keep) else keep.new_zeros(1)  # heads and collectives need at least one position
    if row.head is not None:
        attach_fused_head(row.inner, vocab_size, row.tp_group)
        row.inner.fused_head.request = HeadRequest(row.take(labels[mask])[some], temperature, "grad")
    output = row.run(input_ids[mask], some)
    if row.head is None:
        return output

    def placed(values: Tensor) -> Tensor:
        part = values.new_zeros(len(row.held)).index_copy(0, keep, values[: len(keep)])
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, row.spread(part))

    return CausalLMOutputForPPO(log_probs=placed(output[0, :, 0]), entropy=placed(output[0, :, 1]))


def _packed(position_ids: Tensor | None, mask: Tensor) -> Tensor | None:
    """Return the positions (C, T) of the tokens of all rows; None for those of text, which follow from the rows."""
    return position_ids[:, mask] if position_ids is not None and position_ids.dim() == 3 else None
