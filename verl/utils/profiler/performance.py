"""Time code into a dictionary of seconds, and reduce the times over ranks."""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch.distributed import ReduceOp


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the enclosed code's seconds to ``timing_raw[name]``, even if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def gather_seconds(timing: Mapping[str, float]) -> np.ndarray:
    """Return the timers of all ranks as (ranks, timers), in the order of the names; collective."""
    import torch

    own = torch.tensor(list(timing.values()), dtype=torch.float64)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return own.unsqueeze(0).numpy()
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    return torch.stack(every).numpy()


def reduce_timing(timing_raw: Mapping[str, float], reduce_op: "ReduceOp.RedOpType | None" = None) -> dict[str, float]:
    """Reduce every timer over the ranks, so that all of them report the same; collective.

    Args: ``reduce_op`` is ``AVG`` (the default), ``SUM``, ``MIN`` or ``MAX`` of ``torch.distributed.ReduceOp``.

    Raises: ValueError for another operation.
    """
    from torch.distributed import ReduceOp

    op = ReduceOp.AVG if reduce_op is None else reduce_op
    ways = ((ReduceOp.AVG, "mean"), (ReduceOp.SUM, "sum"), (ReduceOp.MIN, "min"), (ReduceOp.MAX, "max"))
    way = next((name for known, name in ways if known == op), None)
    if way is None:
        raise ValueError(f"reduce_op={reduce_op} must be AVG, SUM, MIN or MAX of torch.distributed.ReduceOp")
    return dict(zip(timing_raw, getattr(gather_seconds(timing_raw), way)(axis=0).tolist(), strict=True))


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """Compare one timer over the ranks; collective.

    Returns: the share of ranks above the (1 - k/100) quantile, the shortest time and the longest.
    """
    seconds = gather_seconds({"seconds": timing})[:, 0]
    above = seconds > np.quantile(seconds, 1 - k / 100)
    return float(above.mean()), float(seconds.min()), float(seconds.max())
