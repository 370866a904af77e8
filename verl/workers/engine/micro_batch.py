"""Cut a batch into micro-batches, mark its counted positions, and pack its rows."""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.utils.seqlen_balancing import prepare_dynamic_batch
from verl.utils.ulysses import all_gather_tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.engine.pass_spec import PassSpec


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass; ``index`` says which rows of the batch they are."""

    rows: "DataProto"
    index: list[int]

    def to(self, device: torch.device) -> "MicroBatch":
        """Move the rows to ``device``."""
        return MicroBatch(self.rows.to(str(device)), self.index)


def tensors_of(data: "DataProto") -> MutableMapping[str, Tensor]:
    """Return the tensors of a batch.

    Raises: ValueError when it has none.
    """
    if data.batch is None:
        raise ValueError("the batch holds no tensors: it needs input_ids, attention_mask, position_ids and responses")
    tensors: Any = data.batch  # a TensorDict behaves like a mapping but does not inherit from MutableMapping
    return tensors


def response_mask_of(data: "DataProto") -> Tensor:
    """Return the counted response tokens (B, R): ``response_mask``, else the attention mask of the response."""
    batch = tensors_of(data)
    if "response_mask" in batch.keys():
        return batch["response_mask"]
    width = batch["responses"].shape[1]
    return batch["attention_mask"][:, -width:]


def check_rows(data: "DataProto", lead: int = 1) -> None:
    """Check that each counted token, and the token ``lead`` positions before it, belongs to its row.

    Raises: ValueError naming the first token that does not.
    """
    attended = tensors_of(data)["attention_mask"].bool()
    counted = response_mask_of(data).bool()
    width = counted.shape[1]
    before = _shift_right(attended, lead)[:, -width:]
    wrong = counted & ~(before & attended[:, -width:])
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"response_mask marks token {column} of row {row}, but attention_mask masks that token or the one before "
            "it: mark only response tokens that follow another token"
        )


def split_batch(data: "DataProto", spec: "PassSpec", ranks_per_sequence: int = 1) -> list[MicroBatch]:
    """Cut a batch into micro-batches. Ranks may end up with different numbers of them.

    ``max_token_len`` limits what one rank holds, so ranks that share each sequence allow that many times more.
    """
    if spec.use_dynamic_bsz:
        assert spec.max_token_len is not None
        parts, indices = prepare_dynamic_batch(data, max_token_len=spec.max_token_len * ranks_per_sequence)
        return [MicroBatch(rows, index) for rows, index in zip(parts, indices, strict=True)]
    size = spec.micro_batch_size or len(data)
    starts = range(0, len(data), size)
    return [
        MicroBatch(rows, list(range(at, at + len(rows)))) for at, rows in zip(starts, data.split(size), strict=True)
    ]


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, shortest row first, and the positions to read.

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
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, counted: Tensor, lead: int = 1
) -> PackedRows:
    """Remove the padding of (b, L) rows, whose last R columns are the response.

    A token is read ``lead`` positions before itself: 1 where the model predicts it, 0 where the model has seen it.
    """
    counts = attention_mask.sum(-1)
    order = counts.argsort(stable=True)
    attended = attention_mask.index_select(0, order).bool()
    lengths = [length for length in counts.sort().values.tolist() if length]
    if not lengths:  # every row is padding: the model still needs one token
        attended[0, 0] = True
        lengths = [1]
    ids = input_ids.index_select(0, order)
    counted_rows = counted.index_select(0, order).bool()
    positions = position_ids.index_select(0, order)
    rows, width = counted.shape
    place = (attended.flatten().cumsum(0) - 1).view_as(attended)
    reader = _shift_right(place, lead)[:, -width:]
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
        keep=reader[counted_rows],
        labels=ids[:, -width:][counted_rows],
        target=target[counted_rows],
        shape=(rows, width),
    )


def _shift_right(columns: Tensor, lead: int) -> Tensor:
    """Move (b, L) columns ``lead`` places to the right."""
    return F.pad(columns[:, : columns.shape[1] - lead], (lead, 0))


def named_scores(scores: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """Name the log-probabilities and, where they were asked for, the entropies."""
    named = zip(("log_probs", "entropy"), scores, strict=False)
    return {name: values for name, values in named if values is not None}


def whole_outputs(
    values: dict[str, Tensor], target: Tensor, shape: tuple[int, int], group: ProcessGroup | None
) -> dict[str, Tensor]:
    """Put (k,) values at their places in (b, R), zero elsewhere; each is on one rank of the group."""
    outputs = {}
    for name, part in values.items():
        output = part.new_zeros(shape[0] * shape[1]).scatter(0, target, part).view(shape)
        outputs[name] = output if group is None else all_gather_tensor(output.unsqueeze(0), 0, group).sum(0)
    return outputs
