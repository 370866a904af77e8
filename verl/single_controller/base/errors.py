"""The errors of calls to a worker group."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallSite:
    """A call of the driver: group, role and method, and the phase and step that it had set."""

    group: str
    role: str
    method: str
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        where = f"phase {self.phase}" if self.phase else "no phase set"
        step = "" if self.step is None else f", step {self.step}"
        return f"method {self.method}, role {self.role}, {where}{step}"


class WorkerError(RuntimeError):
    """A call to a worker group failed, and its actors have been ended."""

    what = "failed"

    def __init__(
        self, site: CallSite, rank: int, actor_name: str, last_error: str, ranks: tuple[int, ...] = ()
    ) -> None:
        self.site = site
        self.group = site.group
        self.role = site.role
        self.method = site.method
        self.phase = site.phase
        self.step = site.step
        self.rank = rank
        self.ranks = ranks or (rank,)
        self.actor_name = actor_name
        self.last_error = last_error
        names = f"rank {rank}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        super().__init__(
            f"worker {names} of group {site.group!r} (actor {actor_name!r}) {self.what}: {site}: {last_error}"
        )

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[CallSite, int, str, str, tuple[int, ...]]]:
        return type(self), (self.site, self.rank, self.actor_name, self.last_error, self.ranks)


class WorkerDiedError(WorkerError):
    """A worker's process ended while the driver waited for the group."""

    what = "died"


class WorkerTaskError(WorkerError):
    """A worker's method raised an exception, which is the cause of this one."""

    what = "raised an exception"


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer before the deadline."""

    what = "did not answer in time"


class PlacementError(ValueError, RuntimeError):
    """The cluster lacks the resources that a pool asks for."""
