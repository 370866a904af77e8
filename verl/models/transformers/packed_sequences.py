"""Where the sequences of a packed row begin and end, and which of them see tokens of others."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_PADDING = 1.25
"""Largest ratio of padded to real tokens in a group of unequal sequences."""


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
    """The nodes of one depth that others stand below: the tokens below each attend to it.

    Attributes:
        queries: the tokens below the nodes, node by node.
        keys: the tokens of the nodes.
        query_bounds: the (n + 1,) int32 offsets of the nodes in ``queries``.
        key_bounds: those in ``keys``.
        max_queries: the most tokens below a node.
        max_keys: the most tokens of a node.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    max_queries: int
    max_keys: int


class PackedSequences:
    """The boundaries of the sequences in a packed row, in the forms that kernels need.

    Args: with ``ends`` the sequences are the nodes of a forest in depth-first order, and the tokens up to ``ends[i]``
        see those of node i (``verl.utils.batch.forest``).

    ``is_read`` tells whether an attention has asked for them.
    """

    is_read = False

    def __init__(self, lengths: list[int], device: torch.device | str, ends: list[int] | None = None) -> None:
        self.lengths = lengths
        self.max_length = max(lengths)
        self.device = device
        self.ends = ends

    @cached_property
    def prefixes(self) -> list[tuple[int, int, int]]:
        """Return (start, stop, end) of the nodes that tokens of others see: those of ``stop:end``."""
        stops = itertools.accumulate(self.lengths)
        found = zip(self.lengths, stops, self.ends or (), strict=False)
        return [(stop - length, stop, end) for length, stop, end in found if end > stop]

    @cached_property
    def levels(self) -> list[Level]:
        """Return the nodes that tokens of others see by their depth, for calls of a kernel with boundaries."""
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
        below, own = ([(stop, end) for _, stop, end in nodes], [(start, stop) for start, stop, _ in nodes])
        queries, keys = ([stop - start for start, stop in ranges] for ranges in (below, own))
        bounds = (self._offsets(sizes) for sizes in (queries, keys))
        return Level(self._rows(below), self._rows(own), *bounds, max(queries), max(keys))

    def _rows(self, ranges: list[tuple[int, int]]) -> slice | Tensor:
        if all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([torch.arange(*each) for each in ranges]).to(self.device, non_blocking=True)

    def _offsets(self, sizes: list[int]) -> Tensor:
        return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(self.device, torch.int32, non_blocking=True)

    @cached_property
    def visible_until(self) -> Tensor:
        """Return for each token the place after the last one that sees it, (T,) on the device."""
        assert self.ends is not None
        ends, lengths = (torch.tensor(each, device=self.device) for each in (self.ends, self.lengths))
        return ends.repeat_interleave(lengths)

    @cached_property
    def block_mask(self) -> Any:
        """Return the mask of a forest for ``flex_attention``; built once and used by every layer."""
        from torch.nn.attention.flex_attention import create_block_mask

        until = self.visible_until

        def sees(batch: Tensor, head: Tensor, at: Tensor, seen: Tensor) -> Tensor:
            return (seen <= at) & (at < until[seen])

        return create_block_mask(sees, None, None, len(until), len(until), device=until.device)

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
