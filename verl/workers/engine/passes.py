"""Passes of an engine over a batch: their options, the micro-batches, packed rows, and sums over the mini-batch.

Sums are gathered in float64 and added in the order of the ranks, so the result is the same on all ranks and in every
run. An all-reduce in fp32 would add in an order that depends on the backend and the number of ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.algos.aggregate import SHARE_COLUMN, UNITS, Extreme, Metric, Sum, count_units
from verl.protocol import DataProto, tensors_of
from verl.utils.batch.forest import cut_neighbours, forest_of, neighbours, token_keys
from verl.utils.device import get_device_name
from verl.utils.flops_counter import image_lengths
from verl.utils.seqlen_balancing import check_token_budget, prepare_dynamic_batch
from verl.utils.ulysses import all_gather_tensor
from verl.utils.vision.multi_modal import concat_distinct_inputs, names_of_inputs

AUX_LOSS = "aux_loss"
"""The balancing loss (0-dim) of a model's experts, among the outputs of a micro-batch that has a gradient."""

EntropyMode = Literal["none", "value", "grad"]
"""Whether entropies are computed, and whether a loss differentiates them."""


@dataclass(frozen=True)
class PassSpec:
    """The options of one forward, or forward and backward, pass.

    Args:
        use_dynamic_bsz: cut micro-batches by tokens (``max_token_len``) instead of rows (``micro_batch_size``).
        micro_batch_size: rows of one forward; None runs the whole batch at once.
        max_token_len: most tokens that one rank holds in one forward.
        temperature: divides the logits.
        entropy: ``value`` returns entropies, ``grad`` also differentiates them.
        full_kl: return the exact divergence from the reference at each token; see ``BaseEngine.set_reference``.
        after_first_forward: called between the first forward of the pass and its backward; tests inject faults there.

    Raises: ValueError when ``use_dynamic_bsz`` has no token limit.
    """

    use_dynamic_bsz: bool = False
    micro_batch_size: int | None = None
    max_token_len: int | None = None
    temperature: float = 1.0
    entropy: EntropyMode = "none"
    full_kl: bool = False
    after_first_forward: Callable[[], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.use_dynamic_bsz and not self.max_token_len:
            raise ValueError(
                f"use_dynamic_bsz=True needs max_token_len_per_gpu of 1 or more, got {self.max_token_len}: "
                "set it, or cut by rows with use_dynamic_bsz=False"
            )

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Read the keys of the established verl interface in ``meta_info``.

        Only this class and ``temperature_of`` read these keys.

        Engines name the cut ``micro_batch_size_per_gpu`` and ``max_token_len_per_gpu``, actors and critics around
        a module (``DataParallelPPOActor``) ``micro_batch_size`` and ``max_token_len``.
        """
        entropy: EntropyMode = "none"
        if meta.get("calculate_entropy", False):
            entropy = "grad" if meta.get("entropy_needs_grad", True) else "value"
        return cls(
            use_dynamic_bsz=bool(meta.get("use_dynamic_bsz", False)),
            micro_batch_size=meta.get("micro_batch_size_per_gpu") or meta.get("micro_batch_size"),
            max_token_len=meta.get("max_token_len_per_gpu") or meta.get("max_token_len"),
            temperature=float(meta.get("temperature", 1.0)),
            entropy=entropy,
            full_kl=bool(meta.get("calculate_full_kl", False)),
        )

    @classmethod
    def from_caller(cls, data: DataProto, needs_temperature: bool = True) -> Self:
        """Read the options that the caller of a bare actor or critic must write into ``meta_info``.

        Raises: ValueError naming the key that is missing.
        """
        meta = data.meta_info
        dynamic = bool(meta.get("use_dynamic_bsz", False))
        needed = "max_token_len" if dynamic else "micro_batch_size"
        if not meta.get(needed):
            raise ValueError(f"the batch's meta_info lacks {needed}: use_dynamic_bsz={dynamic} needs it")
        if needs_temperature:
            temperature_of(data)
        return cls.from_meta(meta)

    def as_meta(self) -> dict[str, Any]:
        """Return the keys of ``meta_info`` that a bare actor reads, see ``from_caller``."""
        return {
            "use_dynamic_bsz": self.use_dynamic_bsz,
            "micro_batch_size": self.micro_batch_size,
            "max_token_len": self.max_token_len,
            "temperature": self.temperature,
        }

    @property
    def entropy_mode(self) -> EntropyMode:
        """The entropy to compute now: without autograd, ``grad`` is ``value``."""
        return "value" if self.entropy == "grad" and not torch.is_grad_enabled() else self.entropy


def temperature_of(data: DataProto) -> float:
    """Return the temperature at which the responses were sampled.

    Raises: ValueError when the batch does not say it.
    """
    if "temperature" not in data.meta_info:
        raise ValueError("the batch's meta_info lacks temperature: write that of the rollout, or 1.0")
    return float(data.meta_info["temperature"])


# Micro-batches


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass; ``index`` says which rows of the batch they are."""

    rows: DataProto
    index: list[int]

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on ``device``; a pass keeps its micro-batches to the end, so these rows stay on the host."""
        return MicroBatch(self.rows.select().to(device), self.index)


def response_mask_of(data: DataProto) -> Tensor:
    """Return the counted response tokens (B, R): ``response_mask``, else the attention mask of the response."""
    batch = tensors_of(data)
    if "response_mask" in batch.keys():
        return batch["response_mask"]
    width = batch["responses"].shape[1]
    return batch["attention_mask"][:, -width:]


def check_rows(data: DataProto, lead: int = 1) -> None:
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


def split_batch(
    data: DataProto, spec: PassSpec, ranks_per_sequence: int = 1, shares_prefixes: bool = False
) -> list[MicroBatch]:
    """Cut a batch into micro-batches. Ranks may end up with different numbers of them.

    ``max_token_len`` limits what one rank holds, so ranks that share each sequence allow that many times more. With
    ``shares_prefixes`` rows that begin alike stay together, and tokens that they share count once.
    """
    if shares_prefixes:
        found = neighbours(keys_of(data), tensors_of(data)["attention_mask"])
        if spec.use_dynamic_bsz:
            assert spec.max_token_len is not None
            limit = spec.max_token_len * ranks_per_sequence
            check_token_budget(limit, tensors_of(data)["attention_mask"].shape[-1])
            runs = cut_neighbours(found, limit)
        else:
            size = spec.micro_batch_size or len(data)
            runs = [(at, min(at + size, len(data))) for at in range(0, len(data), size)]
        parts = [found.order[first:last].tolist() for first, last in runs]
        return [MicroBatch(data.select_idxs(part), part) for part in parts]
    if spec.use_dynamic_bsz:
        assert spec.max_token_len is not None
        parts, indices = prepare_dynamic_batch(data, max_token_len=spec.max_token_len * ranks_per_sequence)
        return [MicroBatch(rows, index) for rows, index in zip(parts, indices, strict=True)]
    size = spec.micro_batch_size or len(data)
    starts = range(0, len(data), size)
    return [
        MicroBatch(rows, list(range(at, at + len(rows)))) for at, rows in zip(starts, data.split(size), strict=True)
    ]


Segment = tuple[int, int]
"""Tokens that several rows may share: the length of a row up to their end, and up to their beginning."""


@dataclass(frozen=True)
class PackedRows:
    """The tokens of some rows end to end, shortest row first, and the positions to read.

    ``keep`` (K,) are the packed positions at which the counted tokens are read, ``labels`` (K,) those tokens,
    ``target`` (K,) their places in the flattened (b, R) response. ``place`` is the packed position of each column of
    the rows, in the packed order, and -1 at padding. ``sampled`` (T,) marks the counted tokens.

    With shared prefixes ``lengths`` are those of the nodes of a forest, which end at ``ends``, and a counted token that
    several rows share is read once: ``readers`` (N,) are the places among ``keep`` of the N targets. ``media_order``
    are the rows whose images stand among the tokens, in their order; by default all, as in ``row_order``. ``segments``
    are what a pass computes.
    """

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T) or (C, 1, T)
    lengths: list[int]
    row_order: Tensor  # (b,)
    keep: Tensor
    labels: Tensor
    target: Tensor
    place: Tensor  # (b, L)
    shape: tuple[int, int]
    sampled: Tensor
    ends: list[int] | None = None
    readers: Tensor | None = None
    media_order: Tensor | None = None
    segments: list[Segment] | None = None


def idle_rows(length: int, device: torch.device) -> DataProto:
    """Return a row without counted tokens, for a rank that only takes part in a pass."""
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).unsqueeze(0)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    return DataProto.from_dict(tensors | {"response_mask": ids})


def pack_rows(data: DataProto, lead: int = 1) -> PackedRows:
    """Remove the padding of (b, L) rows, whose last R columns are the response.

    A token is read ``lead`` positions before itself: 1 where the model predicts it, 0 where the model has seen it.
    """
    batch = tensors_of(data)
    counts = batch["attention_mask"].sum(-1)
    order = counts.argsort(stable=True)
    attended = batch["attention_mask"].index_select(0, order).bool()
    lengths = [length for length in counts.sort().values.tolist() if length]
    if not lengths:  # every row is padding: the model still needs one token
        attended[0, 0] = True
        lengths = [1]
    ids = batch["input_ids"].index_select(0, order)
    counted = response_mask_of(data).index_select(0, order).bool()
    positions = batch["position_ids"].index_select(0, order)
    rows, width = counted.shape
    place = (attended.flatten().cumsum(0) - 1).view_as(attended)
    reader = _shift_right(place, lead)[:, -width:]
    target = torch.arange(rows * width, device=ids.device).view(rows, width).index_select(0, order)
    if positions.dim() == 3:
        packed_positions = positions.transpose(0, 1)[:, attended].unsqueeze(1)
    else:
        packed_positions = positions[attended].unsqueeze(0)
    sampled = torch.zeros(sum(lengths), dtype=torch.bool, device=ids.device)
    return PackedRows(
        input_ids=ids[attended].unsqueeze(0),
        position_ids=packed_positions,
        lengths=lengths,
        row_order=order,
        keep=reader[counted],
        labels=ids[:, -width:][counted],
        target=target[counted],
        place=place.masked_fill(~attended, -1),
        shape=(rows, width),
        sampled=sampled.index_fill(0, place[:, -width:][counted], True),
    )


def pack_shared_rows(data: DataProto, lead: int = 1) -> PackedRows:
    """Remove the padding of (b, L) rows, and hold tokens with which several rows begin once.

    Rows share a token where ids, positions and images agree up to it. The last token of a shared prefix is read once
    for each token that follows it.
    """
    batch = tensors_of(data)
    ids = batch["input_ids"]
    attended = batch["attention_mask"].bool()
    positions = batch["position_ids"]
    counted = response_mask_of(data).bool()
    rows, width = counted.shape
    forest = forest_of(neighbours(keys_of(data), attended))
    if not forest.lengths:  # every row is padding
        return pack_rows(data, lead)
    place = torch.full(ids.shape, -1, device=ids.device)
    place[attended] = forest.place.to(ids.device)
    held = place[attended]
    at = place[:, -width:][counted]
    labels = ids[:, -width:][counted]
    vocabulary = int(ids.max()) + 1  # a token is read once for each place that it follows
    read = _shift_right(place, lead)[:, -width:][counted] * vocabulary + labels
    pairs, readers = torch.unique(read, return_inverse=True)
    packed = ids.new_zeros(forest.num_tokens)
    axes = positions.transpose(0, 1) if positions.dim() == 3 else positions.unsqueeze(0)
    packed_positions = axes.new_zeros(len(axes), forest.num_tokens)
    packed_positions[:, held] = axes[:, attended]
    order = torch.tensor(forest.order, device=ids.device)
    return PackedRows(
        input_ids=packed.index_copy(0, held, ids[attended]).unsqueeze(0),
        position_ids=packed_positions.unsqueeze(1) if positions.dim() == 3 else packed_positions,
        lengths=forest.lengths,
        row_order=order,
        keep=pairs // vocabulary,
        labels=pairs % vocabulary,
        target=torch.arange(rows * width, device=ids.device)[counted.flatten()],
        place=place.index_select(0, order),
        shape=(rows, width),
        sampled=torch.zeros_like(packed, dtype=torch.bool).index_fill(0, at, True),
        ends=forest.ends,
        readers=readers,
        media_order=torch.tensor(forest.firsts),
        segments=[(above + own, above) for own, above in zip(forest.lengths, forest.above, strict=True)],
    )


def keys_of(data: DataProto) -> Tensor:
    """Return keys that tell the tokens of rows apart, (b, L, C); see ``token_keys``.

    Rows with images share tokens if they have the same images, all in the same prompt: each image is then shown once by
    what they share. A tool may have shown some of them where a response has tokens that do not count.
    """
    batch = tensors_of(data)
    ids = batch["input_ids"]
    media = data.non_tensor_batch.get("multi_modal_inputs")
    if media is None:
        return token_keys(ids, batch["position_ids"], batch["attention_mask"])
    counted = response_mask_of(data).bool()
    width = counted.shape[1]
    prompts = ids[:, :-width].cpu().numpy()
    with_tools = (batch["attention_mask"][:, -width:].bool() & ~counted).any(-1).tolist()
    names = enumerate(zip(names_of_inputs(media), with_tools, strict=True))
    shown = [(name, prompts[row].tobytes(), row if tools else -1) for row, (name, tools) in names]
    number = {each: at for at, each in enumerate(dict.fromkeys(shown))}
    kinds = torch.tensor([number[each] for each in shown], device=ids.device)
    return token_keys(ids, batch["position_ids"], batch["attention_mask"], kinds.unsqueeze(1).expand_as(ids))


def _shift_right(columns: Tensor, lead: int) -> Tensor:
    """Move (b, L) columns ``lead`` places to the right."""
    return F.pad(columns[:, : columns.shape[1] - lead], (lead, 0))


def media_of(
    rows: DataProto, order: Tensor | None, device: torch.device
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Join the processor's outputs of the rows, each shared one once, as ``concat_distinct_inputs``.

    ``order`` (b,) is that of the rows in the pass, None the order that they have.
    """
    column = rows.non_tensor_batch.get("multi_modal_inputs")
    if column is None:
        return {}, {}
    inputs, shown = concat_distinct_inputs(column if order is None else [column[at] for at in order.tolist()])
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in inputs.items()}, shown


def images_of(rows: DataProto) -> list[int]:
    """Return the patches of each image and frame that the tower computes for these rows in a pass.

    Images that rows share are computed once, see ``media_of``.
    """
    column = rows.non_tensor_batch.get("multi_modal_inputs")
    if column is None:
        return []
    return image_lengths(dict(zip(names_of_inputs(column), column, strict=True)).values())


def named_scores(scores: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """Name the log-probabilities and, where they were asked for, the entropies."""
    named = zip(("log_probs", "entropy"), scores, strict=False)
    return {name: values for name, values in named if values is not None}


def whole_outputs(
    values: dict[str, Tensor],
    target: Tensor,
    shape: tuple[int, int],
    group: ProcessGroup | None,
    readers: Tensor | None = None,
) -> dict[str, Tensor]:
    """Place values (k,) at ``target`` (n,) of a (b, R) tensor, zero elsewhere; each value is on one rank of the group.

    Target i takes value ``readers[i]``, by default value i.
    """
    outputs = {}
    for name, read in values.items():
        part = read if readers is None else read.index_select(0, readers)
        output = part.new_zeros(shape[0] * shape[1]).scatter(0, target, part).view(shape)
        outputs[name] = output if group is None else all_gather_tensor(output.unsqueeze(0), 0, group).sum(0)
    return outputs


# Sums over a mini-batch: one small collective each


@dataclass(frozen=True)
class Shares:
    """The ``size`` ranks whose rows make up a mini-batch; ``copies`` of them share each row.

    This rank takes shard ``dp_rank`` of a batch. ``dp_group`` holds the ranks with the other shards.
    """

    size: int
    copies: int
    device: torch.device
    group: ProcessGroup | None
    dp_rank: int
    dp_group: ProcessGroup | None

    @property
    def dp_size(self) -> int:
        """Number of shards into which a batch is cut."""
        return self.size // self.copies


def gather_rows(row: Tensor, size: int, group: ProcessGroup | None) -> Tensor:
    """Return the (n,) vectors of the ``size`` ranks of a group, in their order: (size, n), on the device of ``row``."""
    if size == 1:
        return row.unsqueeze(0)
    sent = row.to(get_device_name())
    rows = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(rows, sent, group=group)
    return torch.stack(rows).to(row.device)


def agree(data: DataProto | None, num_micro_batches: int, shares: Shares) -> tuple[dict[str, float], int]:
    """Return the count of every unit in the global mini-batch, and the largest number of micro-batches of a rank.

    Micro-batches count themselves, on all data-parallel ranks.

    Args: ``data`` are the rows of this rank; None if nothing is to be counted.
    """
    counts = torch.zeros(len(UNITS), dtype=torch.float64)
    if data is not None:
        counts = count_units(response_mask_of(data), tensors_of(data).get(SHARE_COLUMN, None))
    row = torch.cat([counts.cpu(), torch.tensor([num_micro_batches], dtype=torch.float64)])
    rows = gather_rows(row, shares.size, shares.group)
    total = rows.sum(0) / shares.copies  # ranks that share sequences counted the same rows
    units = {unit: float(count) or 1.0 for unit, count in zip(UNITS, total[:-1], strict=True)}
    return units | {"constant": 1.0, "micro_batch": float(total[-1])}, int(rows[:, -1].max())


class MetricSums:
    """Accumulate the metrics of the micro-batches of one mini-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, str]] = {}
        self._extremes: dict[str, tuple[Tensor, str]] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        """Add the metrics of one micro-batch."""
        for name, metric in metrics.items():
            if isinstance(metric, Sum):
                total = metric.total.detach().double()
                before = self._sums.get(name)
                self._sums[name] = (total if before is None else before[0] + total, metric.unit)
            elif isinstance(metric, Extreme):
                value = metric.value.detach().double()
                if name in self._extremes:
                    pick = torch.maximum if metric.kind == "max" else torch.minimum
                    value = pick(value, self._extremes[name][0])
                self._extremes[name] = (value, metric.kind)
            else:
                raise TypeError(f"metric {name!r} must be a Sum or an Extreme, got {type(metric).__name__}")

    def reduce(self, units: dict[str, float], shares: Shares) -> dict[str, float]:
        """Return the metrics of the global mini-batch; collective, equal on all ranks."""
        if not self._sums and not self._extremes:
            return {}
        parts = [value for value, _ in (*self._sums.values(), *self._extremes.values())]
        rows = gather_rows(torch.stack(parts).cpu(), shares.size, shares.group)
        totals = (rows[:, : len(self._sums)].sum(0) / shares.copies).tolist()
        reduced = {
            name: total / units[unit] for (name, (_, unit)), total in zip(self._sums.items(), totals, strict=True)
        }
        for column, (name, (_, kind)) in enumerate(self._extremes.items(), start=len(self._sums)):
            values = rows[:, column]
            reduced[name] = float(values.max() if kind == "max" else values.min())
        return reduced
