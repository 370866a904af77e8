"""Wait for actors under a deadline, and find the cause of a failure."""

import itertools
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import exceptions
from ray.exceptions import RayError, RayTaskError

from verl.single_controller.base import WorkerDiedError, WorkerError, WorkerTaskError, WorkerTimeoutError
from verl.single_controller.base.errors import CallSite
from verl.single_controller.ray.resource_pool import Actor

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

Refs = Sequence["ObjectRef[Any]"]

_DEATHS = (
    exceptions.ActorDiedError,
    exceptions.ActorUnavailableError,
    exceptions.LocalRayletDiedError,
    exceptions.NodeDiedError,
    exceptions.OwnerDiedError,
    exceptions.WorkerCrashedError,
)

# An error of a living worker may follow from the death of a peer, which can show this much later.
PEER_GRACE_S = 3.0
# Time for killed actors to disappear.
KILL_GRACE_S = 15.0


@dataclass(frozen=True)
class Seat:
    """A worker of a group: its rank, its name and its actor."""

    rank: int
    name: str
    actor: Actor


class Failure(Exception):
    """The first failed result of a call."""

    def __init__(self, position: int, error: RayError) -> None:
        super().__init__(position, error)
        self.position = position
        self.error = error


def wait_all(refs: Refs, deadline: float) -> list[Any]:
    """Return the values of all references.

    Raises: Failure for the first failed result, TimeoutError at the deadline, which is a time of ``time.monotonic``.
    """
    position = {ref: index for index, ref in enumerate(refs)}
    values: list[Any] = [None] * len(refs)
    pending = list(position)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        try:
            values[position[done[0]]] = ray.get(done[0], timeout=max(1.0, deadline - time.monotonic()))
        except RayError as error:
            if isinstance(error, exceptions.GetTimeoutError) and not isinstance(error, RayTaskError):
                raise TimeoutError from None
            raise Failure(position[done[0]], error) from error
    if len(position) < len(refs):  # the same reference was given more than once
        values = [values[position[ref]] for ref in refs]
    return values


def find_death(seats: Sequence[Seat], refs: Refs, seconds: float) -> tuple[Seat, RayError] | None:
    """Look for a dead worker in the pending results and by asking every actor.

    ``refs`` are the results of the call, one per seat, or empty.
    """
    watched: dict[ObjectRef[Any], Seat] = dict(zip(refs, seats, strict=False))
    watched.update({seat.actor.__ray_ready__.remote(): seat for seat in seats})
    pending = list(watched)
    deadline = time.monotonic() + seconds
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return None
        try:
            ray.get(done[0], timeout=1)
        except RayError as error:
            if _is_death(error):
                return watched[done[0]], error
    return None


def kill_all(actors: Sequence[Actor]) -> None:
    """Kill actors and wait up to ``KILL_GRACE_S`` until their processes are gone."""
    unique = list({actor._actor_id: actor for actor in actors}.values())
    for actor in unique:
        ray.kill(actor, no_restart=True)
    gone = [actor.__ray_ready__.remote() for actor in unique]
    if not gone:
        return
    _, pending = ray.wait(gone, num_returns=len(gone), timeout=KILL_GRACE_S)
    if pending:
        logger.warning("%d of %d actors did not end within %s s", len(pending), len(unique), KILL_GRACE_S)


def _is_death(error: RayError) -> bool:
    # An error of a living worker is also an instance of its cause's class, perhaps the death of an actor it started.
    return isinstance(error, _DEATHS) and not isinstance(error, RayTaskError)


def _text(error: RayError) -> str:
    """Return the type and message of an error, those of the worker's own exception first."""
    if isinstance(error, exceptions.RayActorError) and error.actor_init_failed:
        return f"{_last_raised(str(error))}\n--- in the worker\n{error}"
    if not isinstance(error, RayTaskError):
        return f"{type(error).__name__}: {error}"
    # Ray keeps the exception, or only its class if the exception could not be pickled.
    cause = error.cause
    if isinstance(cause, BaseException):
        message = "".join(traceback.format_exception_only(cause)).strip()
    else:
        message = (cause if isinstance(cause, type) else type(error)).__name__
    return f"{message}\n--- in the worker\n{error}"


def _last_raised(trace: str) -> str:
    """Return the text after the last frame of a stack trace."""
    lines = trace.splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = itertools.dropwhile(lambda line: line.startswith(" "), lines[last_frame + 1 :])
    return "\n".join(message).strip() or lines[0]


def explain(site: CallSite, seats: Sequence[Seat], refs: Refs, failure: Failure) -> WorkerError:
    """Turn the first failure of a call into an error that names its cause."""
    seat = seats[failure.position] if failure.position < len(seats) else seats[0]
    error = failure.error
    if _is_death(error):
        return WorkerDiedError(site, seat.rank, seat.name, _text(error))
    death = find_death(seats, refs, PEER_GRACE_S)
    if death is not None:
        dead, death_error = death
        first = f"\nbefore that, rank {seat.rank} reported {_text(error)}" if dead.rank != seat.rank else ""
        return WorkerDiedError(site, dead.rank, dead.name, _text(death_error) + first)
    silent = _silent(seats, refs) if "timed out" in str(error).lower() else []
    if silent:
        reported = f"rank {seat.rank} gave up waiting in a collective: {_text(error)}"
        return WorkerTimeoutError(site, silent[0].rank, silent[0].name, reported, tuple(quiet.rank for quiet in silent))
    task_error = WorkerTaskError(site, seat.rank, seat.name, _text(error))
    task_error.__cause__ = (
        error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    )
    return task_error


def _silent(seats: Sequence[Seat], refs: Refs) -> list[Seat]:
    """Return the seats whose result is still pending."""
    unique = list(dict.fromkeys(refs))
    done, _ = ray.wait(unique, num_returns=len(unique), timeout=0)
    return [seat for seat, ref in zip(seats, refs, strict=False) if ref not in set(done)]


def explain_timeout(site: CallSite, seats: Sequence[Seat], refs: Refs, timeout_s: float) -> WorkerError:
    """Name the workers that had not answered at the deadline."""
    silent = _silent(seats, refs) or list(seats[:1])
    return WorkerTimeoutError(
        site, silent[0].rank, silent[0].name, f"no answer within {timeout_s:g} s", tuple(seat.rank for seat in silent)
    )
