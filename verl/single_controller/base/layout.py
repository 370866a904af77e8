"""Dispatch by the layout that Megatron-Core workers report, for roles that register no mesh."""

from dataclasses import dataclass
from typing import Any, NamedTuple


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


class DispatchGroup:
    """The part of a worker group that dispatch reads. It keeps what the workers have said of their places.

    Each registered method of the workers becomes a method of the group at run time.
    """

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._megatron_layout: tuple[list[DistRankInfo], DistGlobalInfo] | None = None

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing names only. It also tells type checkers that methods are bound at run time.
        raise AttributeError(f"{type(self).__name__} has no method {name!r}: register it on the worker's class")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)


class Split(NamedTuple):
    """The part of each worker, the number of parts, and the workers whose outputs are collected."""

    parts: list[int]
    num_parts: int
    collected: list[bool]


def layout_of(worker_group: DispatchGroup) -> tuple[list[DistRankInfo], DistGlobalInfo]:
    """Return the place of every worker and the sizes of the axes; ask the workers once."""
    if worker_group._megatron_layout is None:
        sizes = worker_group.get_megatron_global_info()
        worker_group._megatron_layout = worker_group.get_megatron_rank_info(), sizes[0]
    return worker_group._megatron_layout


def data_parallel(worker_group: DispatchGroup) -> Split:
    """Give each worker the part of its data-parallel rank; one worker of each, in the last stage, answers."""
    ranks, sizes = layout_of(worker_group)
    collected = [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == sizes.pp_size - 1 for rank in ranks]
    return Split([rank.dp_rank for rank in ranks], sizes.dp_size, collected)


def pipeline_as_data(worker_group: DispatchGroup) -> Split:
    """Give only tensor-parallel peers the same part, as generation does; one of them answers.

    Parts are numbered by rank, so that the outputs in rank order are in the order of the parts.
    """
    ranks, sizes = layout_of(worker_group)
    parts = [(rank.pp_rank * sizes.dp_size + rank.dp_rank) * sizes.cp_size + rank.cp_rank for rank in ranks]
    return Split(parts, sizes.pp_size * sizes.dp_size * sizes.cp_size, [rank.tp_rank == 0 for rank in ranks])
