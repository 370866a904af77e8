"""The boundaries of the sequences in a packed row, and which sequences attend to others."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MAX_PADDING = 1.25
"""Largest ratio of padded to real tokens in a group of unequal sequences."""

_BLOCK = 128
"""Tokens of a block of a mask."""


@dataclass(frozen=True)
class PaddedGroup:
    """Neighbouring sequences, tokens ``start:stop`` of a packed row, padded to (count, length).

    ``index`` holds the padded positions of the real tokens; None if all sequences have equal length.
    """

    start: int
    stop: int
    count: int
    length: int
    index: Tensor | None = None


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children: the tokens below each node attend to the node.

    Attributes:
        queries: the tokens below the nodes, node by node.
        keys: the tokens of the nodes.
        query_bounds: the (n + 1,) int32 offsets of the nodes in ``queries``.
        key_bounds: the int32 offsets of the nodes in ``keys``.
        max_queries: the most tokens below a node.
        max_keys: the most tokens of a node.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class Paths:
    """The path to each node, its ancestors and itself: its keys in a causal call of a kernel with boundaries.

    Attributes:
        keys: the (n,) tokens of the paths, path by path.
        query_bounds: the int32 offsets of the nodes.
        key_bounds: the int32 offsets of the paths in ``keys``.
        max_queries: the most tokens of a node.
        max_keys: the most tokens of a path.
        places: the (n,) places of the tokens in ``keys``, token by token.
        place_bounds: the (T + 1,) offsets of the tokens in ``places``.
    """

    keys: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    max_queries: int
    max_keys: int
    places: Tensor
    place_bounds: Tensor


class PackedSequences:
    """The boundaries of the sequences in a packed row, in the forms that kernels need.

    Args: with ``ends`` the sequences are the nodes of a forest in depth-first order, and the tokens up to ``ends[i]``
        see those of node i (``verl.utils.batch.forest``).

    ``is_read`` tells whether an attention has asked for the boundaries.
    """

    is_read = False

    def __init__(self, lengths: list[int], device: torch.device | str, ends: list[int] | None = None) -> None:
        self.lengths = lengths
        self.max_length = max(lengths)
        self.device = device
        self.ends = ends
        self._chunks: dict[int, PackedSequences] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @cached_property
    def prefixes(self) -> list[tuple[int, int, int]]:
        """Return (start, stop, end) of each node with children; the tokens ``stop:end`` below it attend to it."""
        stops = itertools.accumulate(self.lengths)
        found = zip(self.lengths, stops, self.ends or (), strict=False)
        return [(stop - length, stop, end) for length, stop, end in found if end > stop]

    @cached_property
    def levels(self) -> list[Level]:
        """Return the nodes with children, grouped by depth, for kernel calls with sequence boundaries."""
        open_until: list[int] = []  # the ends of the nodes above
        depths: list[list[tuple[int, int, int]]] = []
        for start, stop, end in self.prefixes:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if len(open_until) == len(depths):
                depths.append([])
            depths[len(open_until)].append((start, stop, end))
            open_until.append(end)
        return [self._level(nodes) for nodes in depths]

    def _level(self, nodes: list[tuple[int, int, int]]) -> Level:
        below = [(stop, end) for _, stop, end in nodes]
        own = [(start, stop) for start, stop, _ in nodes]
        queries = [stop - start for start, stop in below]
        keys = [stop - start for start, stop in own]
        bounds = self._offsets(queries), self._offsets(keys)
        return Level(self._rows(below), self._rows(own), *bounds, max(queries), max(keys))

    def _rows(self, ranges: list[tuple[int, int]]) -> slice | Tensor:
        if all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([torch.arange(*each) for each in ranges]).to(self.device, non_blocking=True)

    def _offsets(self, sizes: list[int]) -> Tensor:
        return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(self.device, torch.int32, non_blocking=True)

    @cached_property
    def _paths(self) -> list[list[int]]:
        """Return for each node its ancestors and itself."""
        assert self.ends is not None
        found: list[list[int]] = []
        above: list[int] = []
        for node, start in enumerate(self._starts):
            while above and self.ends[above[-1]] <= start:
                above.pop()
            above.append(node)
            found.append(above.copy())
        return found

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths[:-1])]

    @cached_property
    def path_lengths(self) -> list[int]:
        """Return the number of tokens that each node sees, its own included."""
        return [sum(self.lengths[each] for each in path) for path in self._paths]

    @cached_property
    def paths(self) -> Paths:
        """Return the tokens that each node sees, path by path; built once and used by every layer."""
        total = sum(self.path_lengths)
        nodes = torch.tensor([each for path in self._paths for each in path])
        starts = torch.tensor(self._starts)[nodes]
        lengths = torch.tensor(self.lengths)[nodes]
        keys = self._repeated(starts - lengths.cumsum(0) + lengths, lengths, total)
        keys += torch.arange(total, device=self.device)
        counts = self._repeated(nodes.bincount(), torch.tensor(self.lengths), sum(self.lengths))
        bounds = self.cu_seqlens, self._offsets(self.path_lengths)
        places = keys.argsort(stable=True)
        ends = counts.cumsum(0)
        return Paths(keys, *bounds, self.max_length, max(self.path_lengths), places, F.pad(ends, (1, 0)))

    def _repeated(self, values: Tensor, times: Tensor, total: int) -> Tensor:
        """Repeat each value ``times`` times, ``total`` values in all, on the device."""
        values, times = (each.to(self.device, non_blocking=True) for each in (values, times))
        return values.repeat_interleave(times, output_size=total)

    def in_chunks(self, size: int) -> "PackedSequences":
        """Return the sequences cut into chunks, whose tokens see their own chunk only; built once."""
        if size not in self._chunks:
            pieces = [[size] * (length // size) + [length % size] * (length % size > 0) for length in self.lengths]
            self._chunks[size] = PackedSequences(list(itertools.chain(*pieces)), self.device)
        return self._chunks[size]

    @cached_property
    def visible_until(self) -> Tensor:
        """Return for each token the place after the last one that sees it, (T,) on the device."""
        ends = list(itertools.accumulate(self.lengths)) if self.ends is None else self.ends
        until, lengths = (torch.tensor(each, device=self.device) for each in (ends, self.lengths))
        return until.repeat_interleave(lengths)

    def block_mask(self, window: int | None = None) -> "BlockMask":
        """Return the mask for ``flex_attention``, built once and used by every layer."""
        if window not in self._block_masks:
            self._block_masks[window] = self._block_mask(window)
        return self._block_masks[window]

    def _block_mask(self, window: int | None) -> "BlockMask":
        """Make a mask by blocks.

        A block of queries sees something of an earlier block of keys if it begins before the last of these stops to be
        seen, and all of it if it ends before the first does. The (T, T) mask is never made.
        """
        from torch.nn.attention.flex_attention import BlockMask

        until = self.visible_until
        tokens = len(until)

        def sees(batch: Tensor, head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
            visible = (seen <= at) & (at < until[seen])
            return visible if window is None else visible & (at - seen < window)

        count = -(-tokens // _BLOCK)
        first = torch.arange(count, device=until.device) * _BLOCK
        blocks = F.pad(until, (0, count * _BLOCK - tokens)).view(count, _BLOCK)  # a block with less is never seen whole
        earlier = first[None] < first[:, None]  # (query, key)
        some = (earlier & (first[:, None] < blocks.amax(1)[None])) | (first[None] == first[:, None])
        whole = earlier & (first[:, None] + _BLOCK <= blocks.amin(1)[None])
        if window is not None:
            apart = first[:, None] - first[None]
            some &= apart - _BLOCK + 1 < window  # the first query is that far from the last key
            whole &= apart + _BLOCK - 1 < window

        def counts_and_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
            order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
            return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

        kept = *counts_and_order(some & ~whole), *counts_and_order(whole)
        return BlockMask.from_kv_blocks(*kept, _BLOCK, sees, (tokens, tokens))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return the (n + 1,) int32 offsets on the device."""
        return self._offsets(self.lengths)

    @cached_property
    def padded_groups(self) -> list[PaddedGroup]:
        """Return the sequences grouped for batched calls; built once and used by every layer."""
        groups: list[list[int]] = []
        for length in self.lengths:
            joined = [*groups[-1], length] if groups else [length]
            if groups and max(joined) * len(joined) <= _MAX_PADDING * sum(joined):
                groups[-1].append(length)
            else:
                groups.append([length])
        padded = []
        start = 0
        for group in groups:
            stop = start + sum(group)
            longest = max(group)
            index = None
            if min(group) < longest:
                columns = torch.arange(longest)
                index = (columns < torch.tensor(group).unsqueeze(1)).flatten().nonzero().squeeze(1).to(self.device)
            padded.append(PaddedGroup(start, stop, len(group), longest, index))
            start = stop
        return padded
