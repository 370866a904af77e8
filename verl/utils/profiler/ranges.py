"""Mark named ranges for profilers: by MSTX on an Ascend device, else by NVTX if it is installed, else not at all."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ParamSpec, TypeVar

from verl.utils.import_utils import is_nvtx_available
from verl.utils.profiler.performance import simple_timer

P = ParamSpec("P")
T = TypeVar("T")
Range = AbstractContextManager[Any]
"""Marks the enclosed code; what it yields depends on the tool."""
RangeId = int | tuple[Any, ...] | None
"""Identifies an open range: a number for MSTX, a pair for NVTX."""


@cache
def marks() -> tuple[Callable[..., RangeId], Callable[[RangeId], None]]:
    """Return the functions that open and close a range, of the library that this process marks ranges with."""
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
