"""Where a rank stands in the layout of Megatron-Core, told from sizes alone. Imports nothing of it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The place of a rank along each axis, and the sizes of the axes."""

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
        """Whether this is the rank of its data-parallel shard whose outputs are collected."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


def model_parallel_size(engine: Any) -> int:
    """Return how many ranks share one shard of a batch, from the keys of a ``megatron`` node."""
    size: int = (
        engine["tensor_model_parallel_size"] * engine["pipeline_model_parallel_size"] * engine["context_parallel_size"]
    )
    return size


def expert_layout_problem(world_size: int, engine: Any, on_cpu: bool) -> tuple[str, int | None, str] | None:
    """Return the key, value and fault of a cut of the experts that the workers of a stage cannot have; None is none."""
    tp, pp, ep = (engine[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "expert_model"))
    etp = engine["expert_tensor_parallel_size"]
    if etp not in (None, 1, tp):
        return "expert_tensor_parallel_size", etp, f"must be null, 1 or tensor_model_parallel_size={tp}"
    stage, within = world_size // pp, tp if etp is None else etp
    if stage % (ep * within):
        times = f"x expert_tensor_parallel_size={within} " if within > 1 else ""
        return "expert_model_parallel_size", ep, f"{times}must divide the {stage} workers that hold the same layers"
    if on_cpu and ep > 1 and within > 1:
        fault = f"must be 1 with expert_model_parallel_size={ep} on CPU workers: gloo gathers parts of one length only"
        return "expert_tensor_parallel_size", etp, fault
    return None


def place_of(rank: int, world_size: int, engine: Any) -> Place:
    """Return the place of a rank: tensor parallel ranks are neighbours, then context, data and pipeline parallel ones.

    Raises: ValueError when the sizes of ``engine``, a ``megatron`` node, do not divide the ranks.
    """
    tp, pp, cp = (engine[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
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
