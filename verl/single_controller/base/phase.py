"""Which phase of a step the driver is in, so that an error can name it."""

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
    """Name what the driver does in a block; an inner phase without a step keeps the outer one's."""
    token = _current.set(Phase(name, _current.get().step if step is None else step))
    try:
        yield
    finally:
        _current.reset(token)


def current_phase() -> Phase:
    """Return the innermost phase; its fields are None outside of any."""
    return _current.get()
