"""Trajectories of several segments in a training batch: a row for each segment, and each trajectory counted once.

An agent loop hands on a trajectory as one row, its last segment, with the earlier ones in ``EARLIER_COLUMN``. Scores,
filters and validation see one row for each trajectory. ``segment_rows`` then makes a row of each segment, before the
models read the batch. Estimators that compare or sum up trajectories join their rows again (``Joined``).
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregate import SHARE_COLUMN
from verl.experimental.agent_loop.later_images import LATER_INPUTS
from verl.experimental.agent_loop.segments import EARLIER_COLUMN, EarlierSegments
from verl.protocol import DataProto, tensors_of
from verl.trainer.config.rules.batch import workers_of_a_shard
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.grouping import Groups, groups_of, keep_groups
from verl.trainer.ppo.phases import PROMPT_LENGTH, RESPONSE_LENGTH, check_rollout
from verl.utils.numerics.seeding import derive_seed
from verl.utils.py_functional import object_array
from verl.utils.seqlen_balancing import Partition, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.torch_functional import at_last_sampled
from verl.utils.vision.multi_modal import replace_inputs
from verl.workers.roles.batching import NUM_TRAJECTORIES
from verl.workers.rollout.base import DROPPED_COLUMN

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

TRAJECTORY_COLUMN = "__trajectory__"
"""The number of the trajectory of a row, in the order of the requests; -1 for a row that only fills the batch."""
SEGMENT_COLUMN = "__segment__"
"""The number of the segment in its trajectory, from 0; -1 for a row that only fills the batch."""
SEGMENTS_COLUMN = "__segments__"
"""How many rows the trajectory of a row has; 0 for a row that only fills the batch."""
SHARED_COLUMN = "__shared_score__"
"""Whether the score of a row is a copy of its trajectory's score."""
_SCORES = ("rm_scores", "token_level_scores")
_OF_SEGMENT = "segment"


def has_segments(batch: DataProto) -> bool:
    """Whether a trajectory of a batch with one row for each has further segments."""
    return any(each is not None for each in batch.non_tensor_batch.get(EARLIER_COLUMN, ()))


def without_segments(batch: DataProto, reason: str) -> DataProto:
    """Drop the earlier segments of all trajectories, with a warning that says why."""
    if has_segments(batch):
        _warn_once("only the last segment of a trajectory is trained: %s", reason)
    batch.non_tensor_batch.pop(EARLIER_COLUMN, None)
    return batch


# ---- rows of segments


def segment_rows(batch: DataProto) -> DataProto:
    """Return a batch with a row for each segment, trajectory after trajectory, from one with a row per trajectory.

    A row of an earlier segment has all columns of its trajectory, and the tokens of its segment. Its last sampled token
    has the score of the trajectory, unless the loop gave the segment a score. Columns with names in underscores number
    the segments; the tensor ``SHARE_COLUMN`` (N,) is the segment's share of its trajectory's sampled tokens.
    """
    earlier: list[EarlierSegments | None] = list(batch.non_tensor_batch[EARLIER_COLUMN])
    sizes = [1 + (0 if each is None else len(each["scores"])) for each in earlier]
    source = [row for row, size in enumerate(sizes) for _ in range(size)]
    number = [segment for size in sizes for segment in range(size)]
    rows = batch.select_idxs(source)
    is_last = [segment == sizes[row] - 1 for row, segment in zip(source, number, strict=True)]
    places = [at for at, last in enumerate(is_last) if not last]
    parts = [each for each in earlier if each is not None]
    _put_tensors(rows, parts, places)
    _put_columns(rows, parts, places)
    _put_scores(rows, [score for part in parts for score in part["scores"]], places)
    columns = rows.non_tensor_batch
    for name in (PROMPT_LENGTH, RESPONSE_LENGTH):  # lengths of the last segments
        columns.pop(name, None)
    columns[TRAJECTORY_COLUMN] = np.array(source)
    columns[SEGMENT_COLUMN] = np.array(number)
    columns[SEGMENTS_COLUMN] = np.array([sizes[row] for row in source])
    columns[EARLIER_COLUMN] = object_array(
        [earlier[row] if last else None for row, last in zip(source, is_last, strict=True)]
    )
    tensors = tensors_of(rows)
    tokens = tensors["response_mask"].sum(-1).double()
    total = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, torch.tensor(source), tokens)
    tensors[SHARE_COLUMN] = tokens / total.clamp(min=1)[torch.tensor(source)]
    return rows


def _put_tensors(rows: DataProto, parts: Sequence[EarlierSegments], places: Sequence[int]) -> None:
    """Write the tokens of earlier segments, and a new seed for each, to the rows of these segments."""
    tensors = tensors_of(rows)
    if "rollout_log_probs" in tensors.keys() and not all("rollout_log_probs" in part["tensors"] for part in parts):
        _warn_once(
            "segments of agent loops have no response_logprobs: rollout_log_probs are not used for others either"
        )
        tensors.pop("rollout_log_probs")
    shared = set.intersection(*(set(part["tensors"]) for part in parts)) & set(map(str, tensors.keys()))
    for name in sorted(shared - set(_SCORES)):
        tensors[name][places] = torch.cat([part["tensors"][name] for part in parts]).to(tensors[name].dtype)
    if "sampling_seed" in tensors.keys():  # the rows of a trajectory must not share the random choices of tokens
        numbers = [segment for part in parts for segment in range(len(part["scores"]))]
        seeds = zip(tensors["sampling_seed"][places].tolist(), numbers, strict=True)
        tensors["sampling_seed"][places] = torch.tensor([derive_seed(seed, _OF_SEGMENT, at) for seed, at in seeds])


def _put_columns(rows: DataProto, parts: Sequence[EarlierSegments], places: Sequence[int]) -> None:
    """Write the columns that loops set for earlier segments to their rows."""
    columns = rows.non_tensor_batch
    for name in sorted({name for part in parts for name in part["columns"]}):
        values = [value for part in parts for value in part["columns"].get(name, [None] * len(part["scores"]))]
        whole = [None] * len(rows) if name in (LATER_INPUTS,) or name not in columns else list(columns[name])
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        if name == LATER_INPUTS:
            replace_inputs(columns, object_array(whole))
        else:
            columns[name] = object_array(whole)


def _put_scores(rows: DataProto, own: Sequence[float | None], places: Sequence[int]) -> None:
    """Write the score of each earlier segment to its last sampled token."""
    tensors = tensors_of(rows)
    shared = np.zeros(len(rows), dtype=bool)
    shared[[place for place, score in zip(places, own, strict=True) if score is None]] = True
    rows.non_tensor_batch[SHARED_COLUMN] = shared
    for name in set(_SCORES) & set(map(str, tensors.keys())):
        outcome = tensors[name][places].sum(-1)
        given = [score if score is not None else copied for score, copied in zip(own, outcome.tolist(), strict=True)]
        values = torch.tensor(given, dtype=outcome.dtype)
        tensors[name][places] = at_last_sampled(values, tensors["response_mask"][places])


def _response_lengths(batch: DataProto) -> Tensor:
    """Return the number of columns that the response of each row takes, (B,)."""
    tensors = tensors_of(batch)
    mask = tensors["response_mask"]
    if "attention_mask" in tensors.keys():
        mask = tensors["attention_mask"][:, -mask.shape[1] :]
    return (mask.bool() * torch.arange(1, mask.shape[1] + 1)).amax(-1)


# ---- the order of the rows


@dataclass
class Layout:
    """Where the rows of a batch go.

    Attributes:
        order: the row at each place; -1 for a place that a row without tokens fills.
        parts: the rows of each rank; numbers from the number of rows on are those that fill it.
    """

    order: list[int]
    parts: Partition


def arrange(
    trajectories: Sequence[int],
    lengths: Sequence[int],
    steps: int,
    ranks: int,
    divisor: int,
    balanced: bool,
    groups: Groups | None = None,
) -> Layout:
    """Assign rows to mini-batches and ranks so that all segments of a trajectory are in the same mini-batch.

    Mini-batches have equally many trajectories if ``steps`` divides their number, else about equally many rows. A rank
    has one contiguous stretch of places: those of the first mini-batch, then those of the second, and so on, equally
    many of each. Padding rows fill a mini-batch that has too few rows.

    Args:
        trajectories: number of the trajectory of each row, ascending.
        lengths: tokens of each row.
        steps: number of mini-batches of a pass over the batch.
        ranks: number of ranks that share a mini-batch.
        divisor: the number of places, padding included, is a multiple of it.
        balanced: give the ranks about the same number of tokens in each mini-batch.
        groups: with ``balanced``, keep the rows of a group on one rank where they fit.
    """
    rows_of: list[list[int]] = [[] for _ in range(max(trajectories) + 1)]
    for row, trajectory in enumerate(trajectories):
        rows_of[trajectory].append(row)
    sizes = list(map(len, rows_of))
    batches = [list(range(len(sizes)))]
    if steps > 1:
        batches = get_seqlen_balanced_partitions(sizes, steps, equal_size=len(sizes) % steps == 0)
    blocks = [[row for trajectory in sorted(each) for row in rows_of[trajectory]] for each in batches]
    width = max(-(-len(block) // ranks) for block in blocks)
    width += -width % (divisor // math.gcd(divisor, steps * ranks))
    tokens = list(lengths)
    shares: list[Partition] = []
    for block in blocks:
        missing = width * ranks - len(block)
        filled = block + list(range(len(tokens), len(tokens) + missing))
        tokens += [1] * missing
        if balanced and ranks > 1:
            cut = get_seqlen_balanced_partitions([tokens[row] for row in filled], ranks, equal_size=True)
        else:
            cut = [list(range(at, at + width)) for at in range(0, len(filled), width)]
        share = [[filled[at] for at in part] for part in cut]
        if groups is not None and balanced:
            share = keep_groups(share, groups.filled(len(tokens) - len(lengths)), width)
        shares.append(share)
    parts = [[row for share in shares for row in share[rank]] for rank in range(ranks)]
    return Layout([row if row < len(lengths) else -1 for part in parts for row in part], parts)


def placed(rows: DataProto, layout: Layout) -> tuple[DataProto, list[int]]:
    """Return the rows in the layout's order, and the order that undoes it, with filling rows at the end."""
    order = torch.tensor(layout.order)
    filling = order < 0
    batch = rows.select_idxs(order.clamp(min=0))
    if filling.any():
        _make_empty(batch, filling)
    back = torch.where(filling, len(rows), order).argsort(stable=True).tolist()
    return batch, back


def _make_empty(batch: DataProto, rows: Tensor) -> None:
    """Turn the rows of a mask (N,) into filling rows, which have one token and count nowhere."""
    tensors = tensors_of(batch)
    attended = tensors["attention_mask"][rows]
    first = torch.zeros_like(attended).scatter_(1, attended.argmax(-1, keepdim=True), 1)
    tensors["attention_mask"][rows] = first
    for name in ("response_mask", SHARE_COLUMN, "rollout_log_probs", *_SCORES):
        if name in tensors.keys():
            tensors[name][rows] = 0
    columns = batch.non_tensor_batch
    chosen = rows.numpy()
    dropped = columns.get(DROPPED_COLUMN, np.zeros(len(batch), dtype=bool)).astype(bool)
    columns[DROPPED_COLUMN] = dropped | chosen
    for name, value in ((TRAJECTORY_COLUMN, -1), (SEGMENT_COLUMN, -1), (SEGMENTS_COLUMN, 0), (SHARED_COLUMN, False)):
        columns[name] = np.where(chosen, value, columns[name])
    for name, nothing in (("multi_modal_inputs", {}), (EARLIER_COLUMN, None)):
        if name in columns:
            kept = list(columns[name])
            columns[name] = object_array([nothing if chosen[row] else value for row, value in enumerate(kept)])
    if "uid" in columns:
        uids = list(columns["uid"])
        columns["uid"] = object_array([f"fills place {at}" if chosen[at] else uid for at, uid in enumerate(uids)])


def balance_metrics(lengths: Sequence[int], layout: Layout) -> dict[str, float]:
    """Return the tokens of the ranks, as for other batches."""
    filling = sum(row < 0 for row in layout.order)
    return log_seqlen_unbalance([*lengths, *[1] * filling], layout.parts, prefix="global_seqlen")


def rows_for_ranks(
    batch: DataProto, run: RunConfig, step: int, actor_workers: int, workers: Sequence[int]
) -> tuple[DataProto, list[int], dict[str, float]]:
    """Make a row of each segment, and place the rows on the ranks.

    A pass has as many mini-batches as one over whole trajectories, so rows that count nowhere fill the batch.

    Args: ``workers`` are the sizes of all worker groups.
    Returns: the batch, how to put its rows back, and metrics.
    Raises: RuntimeError for a segment that breaks an invariant.
    """
    num_trajectories = len(batch)
    rows = segment_rows(batch)
    check_rollout(rows, rows, step, single_turn=False)
    lengths = tensors_of(rows)["attention_mask"].sum(-1).tolist()
    ranks = max(1, actor_workers // workers_of_a_shard(run.actor_rollout_ref.actor))
    roles = [run.actor_rollout_ref.actor] if run.critic is None else [run.actor_rollout_ref.actor, run.critic]
    samples = run.actor_rollout_ref.rollout.n
    steps = math.lcm(*(max(1, num_trajectories // (role.ppo_mini_batch_size * samples)) for role in roles))
    divisor = steps * math.lcm(ranks, *workers)
    balances = run.trainer.balance_batch
    trajectories = rows.non_tensor_batch[TRAJECTORY_COLUMN].tolist()
    layout = arrange(trajectories, lengths, steps, ranks, divisor, balances, groups_of(rows, run))
    batch, back = placed(rows, layout)
    batch.meta_info[NUM_TRAJECTORIES] = num_trajectories
    metrics = balance_metrics(lengths, layout) if balances else {}
    metrics["segments/rows"] = len(rows)
    metrics["segments/filling_rows"] = len(batch) - len(rows)
    return batch, back, metrics


# ---- trajectories


def per_trajectory(batch: DataProto) -> DataProto:
    """Return one row for each trajectory, its last segment; rows that only fill a batch of segments are left out."""
    columns = batch.non_tensor_batch
    if SEGMENTS_COLUMN not in columns:
        return batch
    return batch.select_idxs(torch.from_numpy(columns[SEGMENT_COLUMN] + 1 == columns[SEGMENTS_COLUMN]) & _real(batch))


def _real(batch: DataProto) -> Tensor:
    return torch.from_numpy(batch.non_tensor_batch[TRAJECTORY_COLUMN] >= 0)


def earlier_segments(batch: DataProto) -> Iterator[EarlierSegments | None]:
    """Yield the earlier segments of each row, None for a trajectory of one segment."""
    yield from batch.non_tensor_batch.get(EARLIER_COLUMN, [None] * len(batch))


class Joined:
    """The trajectories of a batch of segments, each in one long row: (T, W) for the rows (B, R).

    Attributes: ``last`` (T,) are the rows of the last segments, in the order of the trajectories.
        ``tensors`` and ``ARRAYS`` name what it reads of a batch.
    """

    ARRAYS = (TRAJECTORY_COLUMN, SEGMENT_COLUMN, SEGMENTS_COLUMN, SHARED_COLUMN)

    @staticmethod
    def tensors(batch: DataProto) -> tuple[str, ...]:
        """Return the names of the columns that ``of`` reads; empty if every trajectory is one row."""
        is_split = SEGMENTS_COLUMN in batch.non_tensor_batch
        return ("attention_mask", "token_level_scores", "response_mask") if is_split else ()

    def __init__(self, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        real = np.flatnonzero(columns[TRAJECTORY_COLUMN] >= 0)
        order = real[np.lexsort((columns[SEGMENT_COLUMN][real], columns[TRAJECTORY_COLUMN][real]))]
        _, group = np.unique(columns[TRAJECTORY_COLUMN][order], return_inverse=True)
        lengths = _response_lengths(batch)
        sizes = lengths[order].numpy()
        before = np.cumsum(sizes) - sizes
        starts = before - before[np.searchsorted(group, group)]
        self.last = torch.from_numpy(order[np.searchsorted(group, np.arange(group.max() + 1), side="right") - 1])
        self.width = max(1, int((starts + sizes).max()))
        self._group = torch.from_numpy(np.full(len(batch), -1))
        self._group[order] = torch.from_numpy(group)
        self._rows = torch.repeat_interleave(torch.from_numpy(order), torch.from_numpy(sizes))
        self._columns = torch.cat([torch.arange(int(size)) for size in sizes])
        self._targets = self._columns + torch.repeat_interleave(torch.from_numpy(starts), torch.from_numpy(sizes))
        self._batch = batch

    @classmethod
    def of(cls, batch: DataProto) -> Self | None:
        """Return the trajectories of a batch; None if every trajectory is one row."""
        return cls(batch) if SEGMENTS_COLUMN in batch.non_tensor_batch else None

    def join(self, values: Tensor) -> Tensor:
        """Return (B, R) values as (T, W)."""
        joined = values.new_zeros(len(self.last), self.width)
        joined[self._group[self._rows], self._targets] = values[self._rows, self._columns]
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Return (T, W) values as (B, R), zero behind the end of a row."""
        width = tensors_of(self._batch)["response_mask"].shape[1]
        values = joined.new_zeros(len(self._batch), width)
        values[self._rows, self._columns] = joined[self._group[self._rows], self._targets]
        return values

    def rewards(self, values: Tensor) -> Tensor:
        """Move scores or rewards (B, R) to (T, W), once per trajectory, at the end of its last segment."""
        shared = torch.from_numpy(self._batch.non_tensor_batch[SHARED_COLUMN].astype(bool)).unsqueeze(-1)
        return self.join(torch.where(shared, values - tensors_of(self._batch)["token_level_scores"], values))

    def total(self, values: Tensor) -> Tensor:
        """Sum (B,) values over the rows of each trajectory: (T,)."""
        real = self._group >= 0
        return values.new_zeros(len(self.last)).index_add_(0, self._group[real], values[real])
