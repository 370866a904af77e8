"""How the driver waits for actors: with a deadline, and with the cause of a failure found."""

import itertools
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from verl.single_controller.base.errors import (
    CallSite,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
)

logger = logging.getLogger(__name__)

_DEATHS = (
    ActorDiedError,
    ActorUnavailableError,
    LocalRayletDiedError,
    NodeDiedError,
    OwnerDiedError,
    WorkerCrashedError,
)

# After an error from a living worker, how long a dead peer, of which the error is a consequence, may take to show.
PEER_GRACE_S = 3.0
# How long ended actors may take to disappear.
KILL_GRACE_S = 15.0


@dataclass(frozen=True)
class Seat:
    """A worker's place in its group."""

    rank: int
    name: str
    actor: Any


class Failure(Exception):
    """The first failed result of a call."""

    def __init__(self, position: int, error: RayError) -> None:
        super().__init__(position, error)
        self.position = position
        self.error = error


def wait_all(refs: Sequence[Any], deadline: float) -> list[Any]:
    """Return the values of all references.

    Raises: Failure at the first that failed, TimeoutError at the deadline, a time of ``time.monotonic``.
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
            if isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError):
                raise TimeoutError from None
            raise Failure(position[done[0]], error) from error
    if len(position) < len(refs):  # the same reference was given more than once
        values = [values[position[ref]] for ref in refs]
    return values


def find_death(seats: Sequence[Seat], refs: Sequence[Any], seconds: float) -> tuple[Seat, RayError] | None:
    """Look for a dead worker, in the results that are to come and by asking every actor.

    ``refs`` are the results of the call, one per seat, or none.
    """
    watched: dict[Any, Seat] = dict(zip(refs, seats, strict=False))
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


def kill_all(actors: Sequence[Any]) -> None:
    """End actors and wait, for a while, until their processes are gone."""
    unique = list({actor._actor_id: actor for actor in actors}.values())
    for actor in unique:
        ray.kill(actor, no_restart=True)
    gone = [actor.__ray_ready__.remote() for actor in unique]
    _, pending = ray.wait(gone, num_returns=len(gone), timeout=KILL_GRACE_S) if gone else ([], [])
    if pending:
        logger.warning("%d of %d actors did not end within %s s", len(pending), len(unique), KILL_GRACE_S)


def _is_death(error: RayError) -> bool:
    # What a living worker raises is an instance of its cause's class too: perhaps the death of an actor of its own.
    return isinstance(error, _DEATHS) and not isinstance(error, RayTaskError)


def _text(error: RayError) -> str:
    """Return the type and message of an error; of what a task or constructor raised, those of that exception first."""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"{_last_raised(str(error))}\n--- in the worker\n{error}"
    if not isinstance(error, RayTaskError):
        return f"{type(error).__name__}: {error}"
    # Ray keeps the exception, or only its class where the exception could not be pickled.
    cause = error.cause
    kind = type(cause) if isinstance(cause, BaseException) else cause if isinstance(cause, type) else type(error)
    message = (
        "".join(traceback.format_exception_only(cause)).strip() if isinstance(cause, BaseException) else kind.__name__
    )
    return f"{message}\n--- in the worker\n{error}"


def _last_raised(trace: str) -> str:
    """Return what stands behind the last frame of a stack trace."""
    lines = trace.splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = itertools.dropwhile(lambda line: line.startswith(" "), lines[last_frame + 1 :])
    return "\n".join(message).strip() or lines[0]


def explain(site: CallSite, seats: Sequence[Seat], refs: Sequence[Any], failure: Failure) -> WorkerError:
    """Turn the first failure of a call into the error that names its cause."""
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


def _silent(seats: Sequence[Seat], refs: Sequence[Any]) -> list[Seat]:
    """Return the seats whose result is not there."""
    done = set(ray.wait(list(dict.fromkeys(refs)), num_returns=len(set(refs)), timeout=0)[0])
    return [seat for seat, ref in zip(seats, refs, strict=False) if ref not in done]


def explain_timeout(site: CallSite, seats: Sequence[Seat], refs: Sequence[Any], timeout_s: float) -> WorkerError:
    """Name the workers that had not answered at the deadline."""
    silent = _silent(seats, refs) or list(seats[:1])
    return WorkerTimeoutError(
        site, silent[0].rank, silent[0].name, f"no answer within {timeout_s:g} s", tuple(seat.rank for seat in silent)
    )
