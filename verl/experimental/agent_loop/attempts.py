"""The account of attempts at trajectories."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verl.errors import WrongInput
from verl.experimental.agent_loop.held import KeptTokens
from verl.utils.masking import masked_text
from verl.utils.numerics.seeding import derive_seed
from verl.utils.observe.attempts import AttemptLine

OK = "ok"
ERROR = "error"
TIMEOUT = "timeout"
CANCELLED = "cancelled"
REPLACED = "replaced"
DROPPED = "dropped"
_FAILURES = (ERROR, TIMEOUT, REPLACED, DROPPED)
_LONGEST_REASON = 500
Sampling = dict[str, Any]
"""How to sample a request, see ``SamplingParams`` of ``verl.workers.rollout.server``; each request gets its copy."""


class TrajectoryError(RuntimeError):
    """An agent loop failed; the message names row, loop and attempt, and ``attempts`` is the account of the worker."""

    def __init__(self, message: str, attempts: Iterable[AttemptLine] = ()) -> None:
        super().__init__(message)
        self.attempts = list(attempts)

    def __reduce__(self) -> tuple[type["TrajectoryError"], tuple[str, list[AttemptLine]]]:
        return type(self), (str(self), self.attempts)


class TrajectoryInputError(TrajectoryError, WrongInput):
    """An agent loop refused something that the user gave."""


class DeadlineError(TimeoutError):
    """An attempt missed its own deadline or the deadline of the step; the message names the key."""


@dataclass
class Attempt:
    """One try at a trajectory.

    Attributes:
        id: ``<step>-<kind>-<uid>-<sample>-<number>``, unique in a run.
        sample: index of the trajectory in its group.
        loop: name of the agent loop.
        seed: seed of the row, which is that of the first turn; None without sampling.
        servers: the server of each request, in order; one more for each that died.
        trains: whether the trajectory is trained.
        kept: tokens with which its first turn begins, because an earlier run has sampled them.
        turns: requests so far.
        outcome: ``ok``, ``error``, ``timeout``, ``cancelled``, ``replaced`` or ``dropped``; None while it runs.
        reason: why it ended, unless it is ``ok``.
        oldest_version: the oldest version of the weights that sampled a token of it; None if no server says.
        is_cancelled: whether its loop has been told to end.
        is_left: whether its loop ignores that and goes on, and nobody waits for it any more.
    """

    id: str
    uid: str
    sample: int
    loop: str
    seed: int | None = None
    trains: bool = False
    kept: KeptTokens | None = None
    start: float = field(default_factory=time.time)
    end: float | None = None
    servers: list[str] = field(default_factory=list)
    turns: int = 0
    outcome: str | None = None
    reason: str | None = None
    oldest_version: int | None = None
    is_cancelled: bool = False
    is_left: bool = False

    def next_turn(self, params: Sampling) -> Sampling:
        """Return the sampling parameters of the next request, with the row's seed replaced by the seed of the turn.

        A loop that sends other seeds keeps them.

        Raises: RuntimeError if the attempt has ended.
        """
        if self.is_cancelled or self.outcome is not None:
            raise RuntimeError(f"attempt {self.id} has ended: agent loop {self.loop} must not ask for more tokens")
        turn = self.turns
        self.turns = self.turns + 1
        changed = dict(params)
        if turn and self.seed is not None and params.get("seed") == self.seed:
            changed["seed"] = derive_seed(self.seed, "turn", turn)
        return changed

    def sampled_by(self, versions: Iterable[tuple[int, int]]) -> None:
        """Record the weight versions that sampled the tokens of a turn, in the form of ``TokenOutput.versions``."""
        found = [version for version, count in versions if count and version >= 0]
        known = [] if self.oldest_version is None else [self.oldest_version]
        self.oldest_version = min(found + known, default=None)

    def finish(self, outcome: str, reason: str | None = None) -> None:
        """End the attempt, once."""
        if self.is_left:
            reason = f"{reason}; agent loop {self.loop} goes on although it was cancelled, and is left behind"
        if self.outcome is None:
            self.outcome, self.end = outcome, time.time()
            self.reason = None if reason is None else masked_text(reason)

    def line(self) -> AttemptLine:
        """Return the line of the account."""
        return {
            "id": self.id,
            "uid": self.uid,
            "sample": self.sample,
            "loop": self.loop,
            "servers": list(dict.fromkeys(self.servers)),
            "turns": self.turns,
            "start": round(self.start, 3),
            "end": round(self.end or time.time(), 3),
            "outcome": self.outcome or CANCELLED,
            "reason": None if self.reason is None else self.reason[:_LONGEST_REASON],
        }


def attempt_metrics(lines: Iterable[AttemptLine]) -> dict[str, float]:
    """Count the attempts of a batch by outcome.

    ``failed`` counts errors and missed deadlines, whatever came of them; ``retried`` counts attempts after a first.
    """
    counts = dict.fromkeys(("started", "retried", "replaced", "dropped", "cancelled", "failed"), 0)
    for line in lines:
        counts["started"] += 1
        counts["retried"] += not line["id"].endswith("-0")
        counts["failed"] += line["outcome"] in _FAILURES and not (line["reason"] or "").startswith(GROUP_REPLACED)
        if line["outcome"] in (REPLACED, DROPPED, CANCELLED):
            counts[line["outcome"]] += 1
    return {f"attempts/{name}": float(count) for name, count in counts.items()}


GROUP_REPLACED = "another sample of its prompt failed"


def mark_replaced(lines: Iterable[AttemptLine], uids: Iterable[str]) -> None:
    """Mark all samples of these prompts as replaced in the account."""
    gone = set(uids)
    for line in lines:
        if line["uid"] in gone and line["outcome"] == OK:
            line["outcome"], line["reason"] = REPLACED, f"{GROUP_REPLACED}: all its samples are replaced"
