"""Positions of ranks in Megatron-Core's parallel layout, computed from sizes alone, without importing it."""

from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
"""The axes of a layout, as they occur in ``<axis>_parallel_size``."""

Sizes = Mapping[str, int | None]
"""The ``<axis>_parallel_size`` keys of a ``megatron`` node."""


@dataclass(frozen=True)
class Place:
    """The rank along each axis, and the sizes of the axes."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    tp_size: int
    cp_size: int
    dp_size: int
    pp_size: int

    @property
    def holds_outputs(self) -> bool:
        """Whether the outputs of this rank are collected; one rank of each data-parallel shard is."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


def _size(engine: Sizes, axis: str) -> int:
    size = engine[f"{axis}_parallel_size"]
    assert size is not None
    return size


def model_parallel_size(engine: Sizes) -> int:
    """Return the number of ranks that share one shard of a batch."""
    return _size(engine, "tensor_model") * _size(engine, "pipeline_model") * _size(engine, "context")


def expert_layout_problem(world_size: int, engine: Sizes, on_cpu: bool) -> tuple[str, int | None, str] | None:
    """Return the key, value and fault of an impossible expert layout, or None."""
    tp, pp, ep = (_size(engine, axis) for axis in ("tensor_model", "pipeline_model", "expert_model"))
    etp = engine["expert_tensor_parallel_size"]
    if etp not in (None, 1, tp):
        return "expert_tensor_parallel_size", etp, f"must be null, 1 or tensor_model_parallel_size={tp}"
    stage = world_size // pp
    within = tp if etp is None else etp
    if stage % (ep * within):
        times = f"x expert_tensor_parallel_size={within} " if within > 1 else ""
        return "expert_model_parallel_size", ep, f"{times}must divide the {stage} workers that hold the same layers"
    if on_cpu and ep > 1 and within > 1:
        fault = f"must be 1 with expert_model_parallel_size={ep} on CPU workers: gloo gathers only equal lengths"
        return "expert_tensor_parallel_size", etp, fault
    return None


def place_of(rank: int, world_size: int, engine: Sizes) -> Place:
    """Return the place of a rank; tensor-parallel ranks are adjacent, then context, data and pipeline parallel ones.

    Raises: ValueError when the sizes in ``engine``, a ``megatron`` node, do not divide the ranks.
    """
    tp, pp, cp = (_size(engine, axis) for axis in ("tensor_model", "pipeline_model", "context"))
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"megatron.tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} x "
            f"context_parallel_size={cp} must divide the {world_size} workers"
        )
    dp = world_size // (tp * pp * cp)
    return Place(
        tp_rank=rank % tp,
        cp_rank=rank // tp % cp,
        dp_rank=rank // (tp * cp) % dp,
        pp_rank=rank // (tp * cp * dp),
        tp_size=tp,
        cp_size=cp,
        dp_size=dp,
        pp_size=pp,
    )
