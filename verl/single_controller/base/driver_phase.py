"""The phase of the driver: errors of calls to a worker group name it, and the activity file tells it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from verl.errors import Phase
from verl.utils.faults import fault_point
from verl.utils.observe.activity import note_phase

_NO_PHASE = Phase()
_current: ContextVar[Phase] = ContextVar("verl_phase", default=_NO_PHASE)


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Name the phase of a block; an inner phase without a step keeps the outer step."""
    outer = _current.get()
    inner = Phase(name, outer.step if step is None else step)
    token = _current.set(inner)
    note_phase(f"in {inner}")
    try:
        fault_point(f"trainer_{name.partition(' ')[0]}", rank=0, step=inner.step)
        yield
    finally:
        _current.reset(token)
        note_phase(f"after {inner}" if outer == _NO_PHASE else f"in {outer}")


def current_phase() -> Phase:
    """Return the innermost phase; its fields are None outside any phase."""
    return _current.get()
