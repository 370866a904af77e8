"""The errors of calls to a worker group, and the phase of the driver that they name."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from verl.base_config import WrongInput
from verl.utils.faults import fault_point
from verl.utils.observe.activity import note_phase


class Phase(NamedTuple):
    """The name of a phase and the step it belongs to."""

    name: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        where = f"phase {self.name}" if self.name else "no phase set"
        return where if self.step is None else f"{where}, step {self.step}"


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


@dataclass(frozen=True)
class CallSite:
    """A call of the driver: group, role and method, and the phase and step that it had set."""

    group: str
    role: str
    method: str
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        return f"method {self.method}, role {self.role}, {Phase(self.phase, self.step)}"


@dataclass(eq=False, repr=False)
class WorkerError(RuntimeError):
    """A call to a worker group failed, and its actors have been ended.

    ``rank`` is the first rank that failed, ``ranks`` are all of them; ``group`` to ``step`` are those of ``site``.
    """

    site: CallSite
    rank: int
    actor_name: str
    last_error: str
    ranks: tuple[int, ...] = ()
    what = "failed"

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.rank,)
        self.group = self.site.group
        self.role = self.site.role
        self.method = self.site.method
        self.phase = self.site.phase
        self.step = self.site.step
        names = f"rank {self.rank}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        actor = f"worker {names} of group {self.group!r} (actor {self.actor_name!r})"
        super().__init__(f"{actor} {self.what}: {self.site}: {self.last_error}")

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[CallSite, int, str, str, tuple[int, ...]]]:
        return type(self), (self.site, self.rank, self.actor_name, self.last_error, self.ranks)


class WorkerDiedError(WorkerError):
    """A worker's process ended while the driver waited for the group."""

    what = "died"


class WorkerTaskError(WorkerError):
    """A worker's method raised an exception, which is the cause of this one."""

    what = "raised an exception"


class WorkerInputError(WorkerTaskError, WrongInput):
    """A worker's method refused something that the user gave."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer before the deadline."""

    what = "did not answer in time"


class PlacementError(WrongInput, RuntimeError):
    """The cluster lacks the resources that a pool asks for."""
