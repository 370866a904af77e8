"""Run the trajectories of a batch concurrently; retry, drop or replace those that fail."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from verl.errors import WrongInput
from verl.experimental.agent_loop.attempts import (
    CANCELLED,
    DROPPED,
    ERROR,
    OK,
    REPLACED,
    TIMEOUT,
    Attempt,
    DeadlineError,
    TrajectoryError,
    TrajectoryInputError,
)
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.held import KeptTokens
from verl.protocol import DataProto, tensors_of
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRAIN = "train"
"""The kind of batches that are trained."""
_TICK_S = 0.01
"""Least seconds between two looks at a clock that may stand still."""
END_S = 60.0
"""Seconds that a cancelled agent loop gets to end its tools. A loop that goes on is left running."""


class Place(NamedTuple):
    """The position of a trajectory: its row in the step, its group, and its index in the group."""

    row: int
    uid: str
    sample: int


def places_of(batch: DataProto) -> list[Place]:
    """Return row and sample number of each row of a batch, from its tensors, or by counting equal ``uid``."""
    tensors = tensors_of(batch)
    count = len(batch)
    rows = tensors["row"].tolist() if "row" in tensors.keys() else range(count)
    uids = [str(uid) for uid in batch.non_tensor_batch.get("uid", rows)]
    if "sample" in tensors.keys():
        samples = tensors["sample"].tolist()
    else:
        samples = sample_numbers(uids)
    return [Place(*place) for place in zip(rows, uids, samples, strict=True)]


def sample_numbers(uids: Iterable[str]) -> list[int]:
    """Number the rows of each prompt from 0."""
    seen: Counter[str] = Counter()
    numbers = []
    for uid in uids:
        numbers.append(seen[uid])
        seen[uid] += 1
    return numbers


@dataclass(frozen=True)
class Policy:
    """The limits of a batch, and the treatment of failed trajectories.

    Attributes:
        on_failure: ``fail``, ``retry``, ``drop`` or ``replace``.
        num_retries: further attempts at a failed trajectory.
        trajectory_timeout_s: limit of one attempt.
        step_timeout_s: limit of the batch.
        over_sample_rate: share of the trajectories, the last to end, that are given up.
    """

    on_failure: str = "fail"
    num_retries: int = 0
    trajectory_timeout_s: float | None = None
    step_timeout_s: float | None = None
    over_sample_rate: float = 0.0

    @classmethod
    def of(cls, rollout: "RolloutConfig", meta: Mapping[str, Json], greedy: bool) -> Self:
        """Read the keys of ``rollout`` for a batch.

        Validation gives no trajectory up, and drops what it cannot replace. A greedy batch of training holds the
        baselines of ReMax, of which none may be missing.
        """
        agent = rollout.agent
        on_failure = agent.on_failure
        validate = bool(meta.get("validate", False))
        if validate and on_failure == "replace":
            on_failure = "drop"
        if greedy and not validate and on_failure in ("drop", "replace"):
            on_failure = "retry"
        return cls(
            on_failure,
            0 if on_failure == "fail" else agent.num_retries,
            agent.trajectory_timeout_s,
            agent.step_timeout_s,
            0.0 if validate or greedy else rollout.over_sample_rate,
        )


def kind_of(meta: Mapping[str, Json], greedy: bool) -> str:
    """Return the purpose of a batch, which the ids of its attempts name: ``validate``, ``greedy`` or ``train``."""
    return "validate" if meta.get("validate", False) else "greedy" if greedy else TRAIN


@dataclass(frozen=True)
class Task:
    """A trajectory to be made: ``run`` makes one attempt, whose first turn may begin with ``kept`` tokens."""

    place: Place
    loop: str
    seed: int | None
    run: Callable[[Attempt], Awaitable[AgentLoopOutput]]
    kept: KeptTokens | None = None


class BatchOfAttempts:
    """Makes the trajectories of a batch at the same time, and keeps the account of all attempts.

    Args: ``clock`` returns the seconds by which deadlines go.
    Attributes: ``attempts`` are those that were begun, in order.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        policy: Policy,
        kind: str = TRAIN,
        step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempts: list[Attempt] = []
        self._tasks = tasks
        self._policy = policy
        self._prefix = f"{0 if step is None else step}-{kind}"
        self._trains = kind == TRAIN
        self._clock = clock
        self._outputs: list[AgentLoopOutput | None] = [None] * len(tasks)
        self._failure: TrajectoryError | None = None
        self._ended = 0
        self._needed = max(1, int(len(tasks) * (1 - policy.over_sample_rate) + 1e-9)) if tasks else 0
        self._stop = asyncio.Event()
        # Outcome and reason of the attempts that still run.
        self._stopped: tuple[str, str] = (CANCELLED, "the run was interrupted")

    async def results(self) -> list[AgentLoopOutput | None]:
        """Return the trajectory of each task; None for one that was given up.

        It ends at the deadline of the step, or up to ``END_S`` later if a loop does not end when it is cancelled.

        Raises: TrajectoryError if a trajectory failed and the policy does not go on without it.
        """
        running = [asyncio.create_task(self._make(index)) for index in range(len(self._tasks))]
        end = asyncio.create_task(self._stop.wait())
        try:
            if running and not await self._is_done(end, self._policy.step_timeout_s):
                reason = f"rollout.agent.step_timeout_s={self._policy.step_timeout_s:g} is over"
                self._stopped = (TIMEOUT, reason)
        finally:
            for task in (*running, end):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if self._failure is not None:
            self._failure.attempts = [attempt.line() for attempt in self.attempts]
            raise self._failure
        return self._outputs

    async def _make(self, index: int) -> None:
        """Make one trajectory; signal when enough trajectories have ended, or when a failure ends the run."""
        try:
            self._outputs[index] = await self._trajectory(self._tasks[index])
        except TrajectoryError as error:
            self._fail(error)
            return
        except Exception as error:  # a bug in verl: the batch must not wait forever for this trajectory
            task = self._tasks[index]
            of_task = [each for each in self.attempts if (each.uid, each.sample) == task.place[1:]]
            of_task[-1].finish(ERROR, _text_of(error))
            self._fail(failure_of(task, of_task[-1], error))
            return
        self._ended += 1
        if self._ended >= self._needed:
            given_up = len(self._tasks) - self._ended
            self._end(CANCELLED, f"rollout.over_sample_rate={self._policy.over_sample_rate:g}: {given_up} given up")

    def _fail(self, error: TrajectoryError) -> None:
        if self._failure is None:
            self._failure = error
            self._end(CANCELLED, f"the run ends: {error}")

    def _end(self, outcome: str, reason: str) -> None:
        if not self._stop.is_set():
            self._stopped = (outcome, reason)
            self._stop.set()

    async def _trajectory(self, task: Task) -> AgentLoopOutput | None:
        policy = self._policy
        for number in range(1 + policy.num_retries):
            attempt = self._begin(task, number)
            is_last = number == policy.num_retries
            try:
                ended = await self._attempted(task, attempt)
            except asyncio.CancelledError:
                self._cancelled(task, attempt)
                raise
            if not isinstance(ended, BaseException):
                attempt.finish(OK)
                return ended
            missed = isinstance(ended, DeadlineError)
            reason = str(ended) if missed else _text_of(ended)
            failed = TIMEOUT if isinstance(ended, TimeoutError) else ERROR
            if is_last and policy.on_failure in ("fail", "retry"):
                attempt.finish(failed, reason)
                raise failure_of(task, attempt, DeadlineError(attempt.reason) if missed else ended) from ended
            if is_last:
                failed, reason = _OUTCOMES[policy.on_failure], f"{failed}: {reason}"
            attempt.finish(failed, reason)
            logger.warning("attempt %s at a trajectory: %s: %s", attempt.id, attempt.outcome, attempt.reason)
        return None

    async def _attempted(self, task: Task, attempt: Attempt) -> AgentLoopOutput | BaseException:
        """Make one attempt, and end it at its deadline; return the trajectory or the error that ended it.

        Raises: CancelledError only when the batch ends the attempt.
        """
        limit_s = self._policy.trajectory_timeout_s
        work = asyncio.create_task(_result(task.run, attempt))
        try:
            if await self._is_done(work, limit_s):
                return work.result()
        finally:
            if not work.done():
                await _end(work, attempt)
        return DeadlineError(f"rollout.agent.trajectory_timeout_s={limit_s:g} is over")

    async def _is_done(self, work: "asyncio.Task[T]", limit_s: float | None) -> bool:
        """Wait for a task, at most for some seconds of the clock; return whether the task has ended."""
        began = self._clock()
        left: float | None = None
        while not work.done():
            if limit_s is not None:
                left = limit_s - (self._clock() - began)
                if left <= 0:
                    break
            await asyncio.wait({work}, timeout=None if left is None else max(left, _TICK_S))
        return work.done()

    def _begin(self, task: Task, number: int) -> Attempt:
        row, uid, sample = task.place
        attempt_id = f"{self._prefix}-{uid}-{sample}-{number}"
        attempt = Attempt(attempt_id, uid, sample, task.loop, task.seed, self._trains, task.kept)
        self.attempts.append(attempt)
        return attempt

    def _cancelled(self, task: Task, attempt: Attempt) -> None:
        """Account for an attempt that the batch has ended; a missed deadline of the step is a failure."""
        outcome, reason = self._stopped
        policy = self._policy
        if outcome == TIMEOUT and policy.on_failure in _OUTCOMES:
            attempt.finish(_OUTCOMES[policy.on_failure], f"{TIMEOUT}: {reason}")
            return
        attempt.finish(outcome, reason)
        if outcome == TIMEOUT and self._failure is None:
            self._failure = failure_of(task, attempt, DeadlineError(attempt.reason))


_OUTCOMES = {"drop": DROPPED, "replace": REPLACED}


async def _result(
    run: Callable[[Attempt], Awaitable[AgentLoopOutput]], attempt: Attempt
) -> AgentLoopOutput | BaseException:
    """Return the trajectory, or the error that its loop has raised; loops and tools may raise anything."""
    try:
        return await run(attempt)
    except BaseException as error:  # SystemExit would end the event loop, and a panic of Rust code is no Exception
        return error


_LEFT: "set[asyncio.Task[AgentLoopOutput | BaseException]]" = set()  # the event loop holds weak references only


async def _end(work: "asyncio.Task[AgentLoopOutput | BaseException]", attempt: Attempt) -> None:
    """Cancel an agent loop, and wait for its end; a loop that swallows CancelledError is left running."""
    attempt.is_cancelled = True
    work.cancel()
    try:
        await asyncio.wait({work}, timeout=END_S)
    finally:
        if not work.done():
            attempt.is_left = True
            logger.warning("attempt %s: agent loop %s does not end when it is cancelled", attempt.id, attempt.loop)
            _LEFT.add(work)
            work.add_done_callback(_LEFT.discard)


def _text_of(error: BaseException) -> str:
    """Return type and text of an error; the ``__str__`` of a user's class may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as own:  # the __str__ of a user's error may raise anything
        return f"{type(error).__name__}, which has no text: {type(own).__name__} in its __str__"


def failure_of(task: Task, attempt: Attempt, error: BaseException) -> TrajectoryError:
    """Return the error that ends the run because an attempt has failed."""
    kind = TrajectoryInputError if isinstance(error, WrongInput) else TrajectoryError
    return kind(
        f"row {task.place.row} (uid {task.place.uid}, sample {task.place.sample}): agent loop {task.loop} failed in "
        f"attempt {attempt.id}: {_text_of(error)}. To go on without such rows, set "
        "actor_rollout_ref.rollout.agent.on_failure to drop or replace; to try again, to retry"
    )
