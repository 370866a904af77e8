"""Partitioning of sequences into parts of equal work: over ranks, and into micro-batches."""

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.errors import ContractError
from verl.utils.device import get_device_id

if TYPE_CHECKING:
    from verl.protocol import DataProto

Partition = list[list[int]]
_MAX_SWAPS_PER_PART = 64


Batch = TypeVar("Batch", TensorDict, "DataProto")


def ceildiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """Round ``a`` up to a multiple of ``b``."""
    return ceildiv(a, b) * b


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Invert a permutation: return the position of each value."""
    return [int(position) for position in np.argsort(idx_map)]


# ---- partition algorithms

_Part = tuple[int, list[int]]  # total length, indices
_State = list[_Part]  # the non-empty parts, by ascending total


def _merge(a: _State, b: _State, k: int) -> _State:
    """Merge two states: join the fullest parts of one with the emptiest of the other."""
    if len(a) + len(b) <= k:
        big, small = (a, b) if len(a) >= len(b) else (b, a)
        for part in small:
            insort(big, part)
        return big
    alone = k - len(b)  # the fullest parts of a stay alone, because b has empty parts
    joined = a[len(a) - alone :]
    rest = a[: len(a) - alone]
    b_alone = len(b) - len(rest)
    joined = joined + b[len(b) - b_alone :]
    paired = b[: len(b) - b_alone]
    joined += [(x + y, xs + ys) for (x, xs), (y, ys) in zip(rest, reversed(paired), strict=True)]
    joined.sort()
    return joined


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partition:
    """Partition indices by the largest differencing method.

    Args: with ``equal_size`` all parts hold the same number of sequences.
    Returns: ``k_partitions`` lists of indices.
    Raises: ValueError when ``equal_size`` and the sequences do not divide by ``k_partitions``.
    Source: Karmarkar and Karp, "The differencing method of set partitioning" (1982).
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    if equal_size:
        _need_equal(len(order), k_partitions)
        states = [
            [(int(seqlen_list[i]), [i]) for i in order[at : at + k_partitions]]
            for at in range(0, len(order), k_partitions)
        ]
    else:
        states = [[(int(seqlen_list[i]), [i])] for i in order]

    def spread(state: _State) -> int:
        return state[-1][0] - (state[0][0] if len(state) == k_partitions else 0)

    # Each step joins the two states whose parts differ most: the fullest parts of one meet the emptiest of the other,
    # so their differences cancel.
    heap = [(-spread(state), number, state) for number, state in enumerate(states)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        merged = _merge(first, heap[0][2], k_partitions)
        heapq.heapreplace(heap, (-spread(merged), number, merged))
    parts = [indices for _, indices in heap[0][2]] if heap else []
    return parts + [[] for _ in range(k_partitions - len(parts))]


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partition:
    """Assign each sequence, longest first, to the part with the smallest total so far.

    Raises: ValueError when ``equal_size`` and the sequences do not divide by ``k_partitions``.
    """
    if equal_size:
        _need_equal(len(seqlen_list), k_partitions)
    room = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    parts: Partition = [[] for _ in range(k_partitions)]
    heap = [(0, part) for part in range(k_partitions)]
    for i in sorted(range(len(seqlen_list)), key=lambda i: -seqlen_list[i]):
        total, part = heapq.heappop(heap)
        parts[part].append(i)
        if len(parts[part]) < room:
            heapq.heappush(heap, (total + int(seqlen_list[i]), part))
    return parts


def _need_equal(num_items: int, k_partitions: int) -> None:
    if num_items % k_partitions:
        raise ValueError(f"{num_items} sequences do not divide into {k_partitions} parts of equal size")


def _best_exchange(high: np.ndarray, low: np.ndarray, gap: int, moves: bool) -> tuple[int, int] | None:
    """Find the exchange that brings the totals of a fuller and an emptier part closest together.

    Both parts are ascending arrays of lengths. Returns the positions of the sequence to move down and of the one to
    move back (-1: none), or None if no exchange narrows the gap.
    """
    back = np.concatenate([[0], low]) if moves else low
    # Moving a and getting b back changes the gap by 2 (a - b), so the best b lies next to a - gap / 2.
    at = np.searchsorted(back, high - gap / 2)
    best: tuple[float, int, int] | None = None
    for shift in (at - 1, at):
        inside = np.clip(shift, 0, len(back) - 1)
        miss = np.abs(gap - 2 * (high - back[inside]))
        i = int(miss.argmin())
        if miss[i] < gap and (best is None or miss[i] < best[0]):
            best = (float(miss[i]), i, int(inside[i]))
    return None if best is None else (best[1], best[2] - int(moves))


def _pairs(totals: np.ndarray) -> list[tuple[int, int]]:
    """List the pairs of parts whose exchange can narrow the spread: those with the fullest or the emptiest part."""
    emptiest, *between, fullest = totals.argsort(kind="stable").tolist()
    return [(fullest, emptiest), *((fullest, p) for p in between), *((p, emptiest) for p in reversed(between))]


def _even_out(seqlens: np.ndarray, parts: Partition, equal_size: bool) -> Partition:
    """Exchange sequences between parts until their totals differ by one token, or no exchange helps."""
    ordered = [sorted(part, key=lambda i: (seqlens[i], i)) for part in parts]
    totals = np.array([seqlens[part].sum() for part in ordered])
    for _ in range(_MAX_SWAPS_PER_PART * len(parts)):
        if totals.max() - totals.min() <= 1:
            break
        for full, empty in _pairs(totals):
            gap = int(totals[full] - totals[empty])
            high = ordered[full]
            low = ordered[empty]
            moves = not equal_size and len(high) > 1
            found = _best_exchange(seqlens[high], seqlens[low], gap, moves) if gap > 1 else None
            if found is not None:
                break
        else:
            break
        taken = [high.pop(found[0])]
        given = [low.pop(found[1])] if found[1] >= 0 else []
        ordered[full] = sorted(high + given, key=lambda i: (seqlens[i], i))
        ordered[empty] = sorted(low + taken, key=lambda i: (seqlens[i], i))
        change = int(seqlens[taken].sum() - seqlens[given].sum())
        totals[full] -= change
        totals[empty] += change
    return ordered


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> Partition:
    """Partition indices into non-empty parts with balanced totals; each part is in ascending order.

    Raises: ValueError when there are fewer sequences than parts, or ``equal_size`` and they do not divide.
    """
    if k_partitions < 1 or len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} sequences cannot be split into {k_partitions} non-empty parts")
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    is_even = False
    # Prefer parts of equal size if they balance as well: they are found much faster.
    if equal_size or len(lengths) % k_partitions == 0:
        parts = _even_out(lengths, karmarkar_karp(seqlen_list, k_partitions, True), True)
        totals = [int(lengths[part].sum()) for part in parts]
        is_even = max(totals) - min(totals) <= 1
    if not equal_size and not is_even:
        parts = _even_out(lengths, karmarkar_karp(seqlen_list, k_partitions, False), False)
    return [sorted(part) for part in parts]


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: Partition, prefix: str) -> dict[str, float]:
    """Compare the token counts of the parts with those of a split in the given order.

    Returns: ``min, max, minmax_diff`` in order, ``balanced_min, balanced_max`` and ``mean``, under ``prefix/``.
    """
    parts = len(partitions)
    size = ceildiv(len(seqlen_list), parts)
    in_order = [sum(seqlen_list[at : at + size]) for at in range(0, len(seqlen_list), size)]
    balanced = [sum(seqlen_list[i] for i in part) for part in partitions]
    return {
        f"{prefix}/min": min(in_order),
        f"{prefix}/max": max(in_order),
        f"{prefix}/minmax_diff": max(in_order) - min(in_order),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(seqlen_list) / parts,
    }


# ---- micro-batches by tokens


def _sequence_lengths(batch: TensorDict) -> tuple[list[int], int]:
    """Return the tokens per row and the width of the widest row, of a padded or nested batch."""
    if "input_ids" in batch.keys() and batch["input_ids"].is_nested:
        lengths = batch["input_ids"].offsets().diff().tolist()
        return lengths, max(lengths)
    mask = batch["attention_mask"]
    return mask.sum(dim=-1).tolist(), mask.shape[-1]


def check_token_budget(max_token_len: int, width: int) -> None:
    """Raise ContractError if a padded row of ``width`` tokens exceeds the budget of a micro-batch."""
    if max_token_len < width:
        raise ContractError(
            f"max_token_len={max_token_len} is below the longest padded row, {width} tokens: raise "
            "ppo_max_token_len_per_gpu (or log_prob_max_token_len_per_gpu) to at least that"
        )


def _fit(lengths: list[int], num_parts: int, max_token_len: int) -> Partition:
    """Partition into the smallest number of parts, at least ``num_parts``, that are all within the budget."""
    for count in range(num_parts, len(lengths) + 1):
        parts = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        if max(sum(lengths[i] for i in part) for part in parts) <= max_token_len:
            break
    return parts


def _split_to(parts: Partition, lengths: list[int], count: int) -> Partition:
    """Split parts until there are exactly ``count``, so that none becomes longer."""
    if len(parts) == count:
        return parts
    balanced = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    bound = max(sum(lengths[i] for i in part) for part in parts)
    if max(sum(lengths[i] for i in part) for part in balanced) <= bound:
        return balanced
    parts = [list(part) for part in parts]
    while len(parts) < count:
        parts.sort(key=lambda part: (len(part) > 1, sum(lengths[i] for i in part)))
        longest = parts.pop()
        parts += [longest[::2], longest[1::2]]
    return parts


def _max_over_ranks(value: int, group: dist.ProcessGroup) -> int:
    on_host = "cpu:" in str(dist.get_backend_config(group))
    count = torch.tensor([value], device="cpu" if on_host else get_device_id())
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    return int(count.item())


def rearrange_micro_batches(
    batch: Batch,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Batch], Partition]:
    """Split a TensorDict or DataProto into micro-batches of balanced token counts, none above ``max_token_len``.

    Collective over ``dp_group`` if given: all ranks then make the same number of micro-batches.

    Args: ``batch`` holds ``attention_mask`` (B, L) or nested ``input_ids``.
    Returns: (micro-batches, the rows of each), ordered by descending sum of squared lengths.
    Raises: ContractError, a ValueError and an AssertionError, when a padded row exceeds the budget or there are
        fewer rows than micro-batches.
    """
    tensors = batch if isinstance(batch, TensorDict) else batch.batch
    assert tensors is not None
    lengths, width = _sequence_lengths(tensors)
    check_token_budget(max_token_len, width)
    wanted = max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1)
    parts = _fit(lengths, max(1, min(len(lengths), wanted)), max_token_len)
    count = len(parts)
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        count = _max_over_ranks(count, dp_group)
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    if count > len(lengths):
        raise ContractError(
            f"{len(lengths)} rows cannot make {count} micro-batches, which other ranks or num_batches_divided_by="
            f"{num_batches_divided_by} require: give every rank the same number of rows, or raise the token budget"
        )
    parts = _split_to(parts, lengths, count)
    if use_dynamic_bsz_balance:
        # Heaviest first: ranks then process similar micro-batches at the same time, and memory peaks early.
        parts = sorted(parts, key=lambda part: (-sum(lengths[i] ** 2 for i in part), part))
    if isinstance(batch, TensorDict):
        return [batch[torch.tensor(part)] for part in parts], parts
    return [batch.select_idxs(part) for part in parts], parts


def prepare_dynamic_batch(data: Batch, max_token_len: int, **options: Any) -> tuple[list[Batch], Partition]:
    """Split a batch with its non-tensors; options as in ``rearrange_micro_batches``."""
    return rearrange_micro_batches(data, max_token_len, **options)


def restore_dynamic_batch(data: Tensor, batch_idx_list: Partition) -> Tensor:
    """Put the rows of concatenated micro-batches back into the order of the batch."""
    order = [i for part in batch_idx_list for i in part]
    if len(order) != len(data):
        raise ValueError(f"{len(order)} indices cannot restore {len(data)} rows")
    return data[torch.tensor(get_reverse_idx(order), device=data.device)]
