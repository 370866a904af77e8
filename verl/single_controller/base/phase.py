"""The driver's current phase and step, which errors name."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Phase(NamedTuple):
    """The name of a phase and the step it belongs to."""

    name: str | None = None
    step: int | None = None


_NO_PHASE = Phase()
_current: ContextVar[Phase] = ContextVar("verl_phase", default=_NO_PHASE)


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Name the phase of a block; an inner phase without a step keeps the outer step."""
    token = _current.set(Phase(name, _current.get().step if step is None else step))
    try:
        yield
    finally:
        _current.reset(token)


def current_phase() -> Phase:
    """Return the innermost phase; its fields are None outside any phase."""
    return _current.get()
