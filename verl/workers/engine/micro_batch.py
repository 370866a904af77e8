"""How a mini-batch is cut, which positions of it count, and how its rows are packed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.seqlen_balancing import prepare_dynamic_batch

if TYPE_CHECKING:
    from verl.protocol import DataProto


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a mini-batch for one forward pass."""

    rows: "DataProto"
    index: list[int]


def tensors_of(data: "DataProto") -> Mapping[str, Tensor]:
    """Return the tensors of a batch.

    Raises: ValueError when it has none.
    """
    if data.batch is None:
        raise ValueError("the batch holds no tensors: it needs input_ids, attention_mask, position_ids and responses")
    batch: Any = data.batch  # a TensorDict reads like a mapping, but is none
    return cast(Mapping[str, Tensor], batch)


def response_mask_of(data: "DataProto") -> Tensor:
    """Return which response tokens count (B, R): ``response_mask``, else the attention mask of the response."""
    batch = tensors_of(data)
    if "response_mask" in batch.keys():
        return batch["response_mask"]
    width = batch["responses"].shape[1]
    return batch["attention_mask"][:, -width:]


def check_rows(data: "DataProto", lead: int = 1) -> None:
    """Check that every counted token, and the one ``lead`` positions before it, is a token of the row.

    Raises: ValueError naming the first that is not.
    """
    attended = tensors_of(data)["attention_mask"].bool()
    asked = response_mask_of(data).bool()
    width = asked.shape[1]
    before = _shifted(attended, lead)[:, -width:]
    wrong = asked & ~(before & attended[:, -width:])
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"response_mask marks token {column} of row {row}, but attention_mask leaves it or the token before "
            "it out: mark only tokens of the response that follow another token"
        )


def cut(data: "DataProto", sp_size: int = 1) -> list[MicroBatch]:
    """Cut a batch as its ``meta_info`` says.

    ``max_token_len_per_gpu`` bounds what one rank holds; ranks that share a sequence hold a part each. Ranks may end
    up with different numbers of micro-batches.

    Raises: ValueError when the key that the chosen way needs is missing.
    """
    meta = data.meta_info
    if meta.get("use_dynamic_bsz", False):
        max_token_len = meta.get("max_token_len_per_gpu")
        if not max_token_len:
            raise ValueError("use_dynamic_bsz needs max_token_len_per_gpu in the batch's meta_info, a positive number")
        parts, indices = prepare_dynamic_batch(data, max_token_len=max_token_len * sp_size)
        return [MicroBatch(rows, index) for rows, index in zip(parts, indices, strict=True)]
    size = meta.get("micro_batch_size_per_gpu") or len(data)
    cuts = [(at, min(at + size, len(data))) for at in range(0, len(data), size)]
    return [MicroBatch(data.slice(start, stop), list(range(start, stop))) for start, stop in cuts]


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, shortest row first, and what is asked of them.

    ``keep`` (K,) are the packed positions at which the counted tokens are read, ``labels`` (K,) those tokens,
    ``target`` (K,) their places in the flattened (b, R) response.
    """

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T) or (C, 1, T)
    lengths: list[int]
    row_order: Tensor  # (b,)
    keep: Tensor
    labels: Tensor
    target: Tensor
    shape: tuple[int, int]


def pack_rows(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, asked: Tensor, lead: int = 1
) -> PackedRows:
    """Remove the padding of (b, L) rows, of which the last R columns are the response.

    A token is read ``lead`` positions before its own: 1 is where it is predicted, 0 where the model has seen it.
    """
    counts = attention_mask.sum(-1)
    order = counts.argsort(stable=True)
    attended = attention_mask.index_select(0, order).bool()
    lengths = [length for length in counts.sort().values.tolist() if length]
    if not lengths:  # rows of padding alone, of which nothing is asked: a forward pass wants a token
        attended[0, 0], lengths = True, [1]
    ids, asked_rows = input_ids.index_select(0, order), asked.index_select(0, order).bool()
    positions = position_ids.index_select(0, order)
    rows, width = asked.shape
    place = (attended.flatten().cumsum(0) - 1).view_as(attended)
    reader = _shifted(place, lead)[:, -width:]
    target = torch.arange(rows * width, device=ids.device).view(rows, width).index_select(0, order)
    if positions.dim() == 3:
        packed_positions = positions.transpose(0, 1)[:, attended].unsqueeze(1)
    else:
        packed_positions = positions[attended].unsqueeze(0)
    return PackedRows(
        input_ids=ids[attended].unsqueeze(0),
        position_ids=packed_positions,
        lengths=lengths,
        row_order=order,
        keep=reader[asked_rows],
        labels=ids[:, -width:][asked_rows],
        target=target[asked_rows],
        shape=(rows, width),
    )


def _shifted(columns: Tensor, lead: int) -> Tensor:
    """Return (b, L) columns moved ``lead`` places to the right."""
    return F.pad(columns[:, : columns.shape[1] - lead], (lead, 0))


def unpack(values: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    """Put (K,) values at their places in (b, R); zero elsewhere."""
    flat = values.new_zeros(shape[0] * shape[1])
    return flat.scatter(0, target, values).view(shape)
