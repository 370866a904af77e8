"""Named ranges of time: MSTX on an Ascend device, else NVTX where it is installed, else nothing but the time."""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ParamSpec, Protocol, TypeVar

from verl.utils.import_utils import is_nvtx_available
from verl.utils.profiler.performance import simple_timer

P = ParamSpec("P")
T = TypeVar("T")


class Marks(Protocol):
    """A library that marks ranges; each takes the options of ``mark_start_range`` that it knows."""

    def start(self, message: str | None, **options: Any) -> Any:
        """Open a range and return what closes it."""

    def end(self, range_id: Any) -> None:
        """Close a range."""


class _Nvtx:
    def __init__(self) -> None:
        import nvtx

        self._nvtx = nvtx

    def start(self, message: str | None, **options: Any) -> Any:
        return self._nvtx.start_range(message=message, **options)

    def end(self, range_id: Any) -> None:
        self._nvtx.end_range(range_id)


class _Mstx:
    def __init__(self) -> None:
        from torch_npu.npu import mstx

        self._mstx = mstx

    def start(self, message: str | None, **options: Any) -> Any:
        return self._mstx.range_start(message)  # it knows neither colors nor domains

    def end(self, range_id: Any) -> None:
        self._mstx.range_end(range_id)


class _NoMarks:
    def start(self, message: str | None, **options: Any) -> Any:
        return None

    def end(self, range_id: Any) -> None:
        return None


@cache
def marks() -> Marks:
    """Return the library that marks ranges in this process."""
    from verl.utils.device import is_npu_available

    if is_npu_available:  # whose tools read no NVTX, and nvtx may be installed all the same
        return _Mstx()
    return _Nvtx() if is_nvtx_available() else _NoMarks()


def mark_start_range(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Any:
    """Open a range; returns what ``mark_end_range`` closes it by."""
    return marks().start(message, color=color, domain=domain, category=category)


def mark_end_range(range_id: Any) -> None:
    """Close a range."""
    marks().end(range_id)


@contextmanager
def marked_range(message: str, **options: Any) -> Iterator[None]:
    """Mark the enclosed code, also where it raises."""
    range_id = mark_start_range(message, **options)
    try:
        yield
    finally:
        mark_end_range(range_id)


def mark_annotate(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark every call of a function by ``message``, or by its name."""

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with marked_range(message or func.__name__, color=color, domain=domain, category=category):
                return func(*args, **kwargs)

        return call

    return decorate


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """Add seconds as ``simple_timer`` does, and mark the range."""
    with simple_timer(name, timing_raw), marked_range(name, color=color, domain=domain, category=category):
        yield


# ---- parts of a task, marked only while it is captured

_open: list[Callable[[str], AbstractContextManager[Any]]] = []
_NOTHING = nullcontext()


@contextmanager
def capturing(make_range: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let ``captured_range`` make ranges of a capture as long as it is open in this process."""
    _open.append(make_range)
    try:
        yield
    finally:
        _open.remove(make_range)


def is_capturing() -> bool:
    """Whether a task is being captured in this process."""
    return bool(_open)


def captured_range(name: str) -> AbstractContextManager[Any]:
    """Mark a part of a task in the capture that is open in this process; where none is, this costs a look."""
    return _open[-1](name) if _open else _NOTHING
