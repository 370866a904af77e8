"""Dispatch by the layout that workers on Megatron-Core report, for roles that register no mesh."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
    from verl.single_controller.base.worker_group import WorkerGroup


def layout_of(worker_group: "WorkerGroup") -> "tuple[list[DistRankInfo], DistGlobalInfo]":
    """Return the place of every worker and the sizes of the axes; the workers are asked once."""
    if worker_group._megatron_layout is None:
        sizes: Any = worker_group.get_megatron_global_info()
        worker_group._megatron_layout = worker_group.get_megatron_rank_info(), sizes[0]
    return worker_group._megatron_layout


def data_parallel_map(worker_group: "WorkerGroup") -> tuple[list[int], int]:
    """Return which part each worker takes, and how many parts there are: one for each data-parallel rank."""
    ranks, sizes = layout_of(worker_group)
    return [rank.dp_rank for rank in ranks], sizes.dp_size


def output_mask(worker_group: "WorkerGroup") -> list[bool]:
    """Return whose outputs count: one worker of each data-parallel rank, in the last stage."""
    ranks, sizes = layout_of(worker_group)
    return [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == sizes.pp_size - 1 for rank in ranks]


def pipeline_as_data_map(worker_group: "WorkerGroup") -> tuple[list[int], int]:
    """Return the same where only tensor-parallel workers share a part, as in generation.

    Parts are numbered by rank, so that outputs in the order of ranks are in the order of parts.
    """
    ranks, sizes = layout_of(worker_group)
    parts = [(rank.pp_rank * sizes.dp_size + rank.dp_rank) * sizes.cp_size + rank.cp_rank for rank in ranks]
    return parts, sizes.pp_size * sizes.dp_size * sizes.cp_size


def pipeline_as_data_mask(worker_group: "WorkerGroup") -> list[bool]:
    """Return whose outputs count there: one worker of each tensor-parallel group."""
    return [rank.tp_rank == 0 for rank in layout_of(worker_group)[0]]
