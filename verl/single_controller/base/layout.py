"""Dispatch by the layout that Megatron-Core workers report, for roles that register no mesh."""

from dataclasses import dataclass
from typing import Protocol


@dataclass
class DistRankInfo:
    """The place of a worker on each axis of its parallel layout."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """The size of each axis of a parallel layout."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class LayoutGroup(Protocol):
    """A worker group whose workers report their layout; ``_megatron_layout`` keeps the answer."""

    _megatron_layout: tuple[list[DistRankInfo], DistGlobalInfo] | None

    def get_megatron_rank_info(self) -> list[DistRankInfo]:
        """Ask every worker for its place."""

    def get_megatron_global_info(self) -> list[DistGlobalInfo]:
        """Ask every worker for the sizes of the axes."""


def layout_of(worker_group: LayoutGroup) -> tuple[list[DistRankInfo], DistGlobalInfo]:
    """Return the place of every worker and the sizes of the axes; ask the workers once."""
    if worker_group._megatron_layout is None:
        sizes = worker_group.get_megatron_global_info()
        worker_group._megatron_layout = worker_group.get_megatron_rank_info(), sizes[0]
    return worker_group._megatron_layout


def data_parallel_map(worker_group: LayoutGroup) -> tuple[list[int], int]:
    """Return each worker's data-parallel rank, which is the part it takes, and the number of parts."""
    ranks, sizes = layout_of(worker_group)
    return [rank.dp_rank for rank in ranks], sizes.dp_size


def output_mask(worker_group: LayoutGroup) -> list[bool]:
    """Mark one worker of each data-parallel rank, in the last stage: its output is collected."""
    ranks, sizes = layout_of(worker_group)
    return [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == sizes.pp_size - 1 for rank in ranks]


def pipeline_as_data_map(worker_group: LayoutGroup) -> tuple[list[int], int]:
    """Return the part of each worker and the number of parts, when only tensor-parallel peers share a part.

    Generation uses this. Parts are numbered by rank, so that the outputs in rank order are in the order of the parts.
    """
    ranks, sizes = layout_of(worker_group)
    parts = [(rank.pp_rank * sizes.dp_size + rank.dp_rank) * sizes.cp_size + rank.cp_rank for rank in ranks]
    return parts, sizes.pp_size * sizes.dp_size * sizes.cp_size


def pipeline_as_data_mask(worker_group: LayoutGroup) -> list[bool]:
    """Mark one worker of each tensor-parallel group: its output is collected."""
    ranks, _ = layout_of(worker_group)
    return [rank.tp_rank == 0 for rank in ranks]
