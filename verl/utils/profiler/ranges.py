"""Time code, and mark ranges of it: by MSTX on an Ascend device, else by NVTX if it is installed, else not at all."""

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from verl.utils.import_utils import is_nvtx_available
from verl.utils.observe import timeline

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import ReduceOp

P = ParamSpec("P")
T = TypeVar("T")
Range = AbstractContextManager[Any]
"""Marks the enclosed code; each tool yields a value of another kind."""
RangeId = int | tuple[Any, ...] | None
"""Identifies an open range: a number for MSTX, a pair for NVTX."""


# ---- timers


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the enclosed code's seconds to ``timing_raw[name]``, even if it raises; a timeline shows it too."""
    start = time.perf_counter()
    try:
        with timeline.span(name):
            yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def gather_seconds(timing: Mapping[str, float]) -> "np.ndarray":
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
    import numpy as np  # here, because the launching process imports this module and needs no numpy

    seconds = gather_seconds({"seconds": timing})[:, 0]
    above = seconds > np.quantile(seconds, 1 - k / 100)
    return float(above.mean()), float(seconds.min()), float(seconds.max())


# ---- ranges


@cache
def marks() -> tuple[Callable[..., RangeId], Callable[[RangeId], None]]:
    """Return the functions of this process's marking library that open and close a range."""
    from verl.utils.device import is_npu_available

    if is_npu_available:  # Ascend tools ignore NVTX, even if nvtx is installed
        from torch_npu.npu import mstx

        def start(message: str | None, **options: str | None) -> RangeId:
            return mstx.range_start(message)  # MSTX has neither colors nor domains

        return start, mstx.range_end
    if is_nvtx_available():
        import nvtx

        return nvtx.start_range, nvtx.end_range
    return _mark_nothing, _mark_nothing


def _mark_nothing(*range_id: RangeId, **options: str | None) -> None:
    """Open or close no range, because no library is installed."""


def mark_start_range(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> RangeId:
    """Open a range and return its id for ``mark_end_range``."""
    start, _ = marks()
    return start(message=message, color=color, domain=domain, category=category)


def mark_end_range(range_id: RangeId) -> None:
    """Close a range."""
    _, end = marks()
    end(range_id)


@contextmanager
def marked_range(message: str, **options: str | None) -> Iterator[None]:
    """Mark the enclosed code; close the range even if it raises."""
    range_id = mark_start_range(message, **options)
    try:
        yield
    finally:
        mark_end_range(range_id)


def mark_annotate(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark every call of a function with ``message``, or with its name."""

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        return marked_range(message or func.__name__, color=color, domain=domain, category=category)(func)

    return decorate


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Time the enclosed code like ``simple_timer`` and mark it as a range."""
    with simple_timer(name, timing_raw), marked_range(name, color=color, domain=domain, category=category):
        yield


# ---- parts of a task, marked only during a capture

_open: list[Callable[[str], Range]] = []
_NOTHING = nullcontext()


@contextmanager
def capturing(make_range: Callable[[str], Range]) -> Iterator[None]:
    """Let ``captured_range`` use ``make_range`` while the enclosed code runs in this process."""
    _open.append(make_range)
    try:
        yield
    finally:
        _open.remove(make_range)


def is_capturing() -> bool:
    """Return whether a task is being captured in this process."""
    return bool(_open)


def captured_range(name: str) -> Range:
    """Mark a part of a task in this process's open capture; do nothing if there is none."""
    return _open[-1](name) if _open else _NOTHING
