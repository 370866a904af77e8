"""Faults on demand, so that tests can prove what a run does when a process dies or hangs.

``VERL_FAULT`` holds ``action:point[:key=value]...``, for instance ``kill:update_actor:rank=1:step=2``. Actions are
``kill`` (SIGKILL to the own process), ``hang`` (SIGSTOP), ``raise`` (an exception), ``slow`` (half a second of sleep)
and, of ``weight_sync`` only, ``skip`` (it is left out, on all ranks). A fault fires once, but for ``slow``, which fires
each time; it writes the time at which it did to ``VERL_FAULT_FILE`` first, as proof that the phase was entered.
"""

import os
import signal
import time
from dataclasses import dataclass
from functools import cache

from verl.utils import envs

ACTIONS = ("kill", "hang", "raise", "slow", "skip")
SLOW_S = 0.5
SKIPPABLE = ("weight_sync",)


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, at which named point, on which rank and step (None is any)."""

    action: str
    point: str
    rank: int | None = None
    step: int | None = None


class InjectedFault(RuntimeError):
    """The exception of the ``raise`` action."""


@cache
def parse_fault(text: str) -> Fault:
    """Read the value of ``VERL_FAULT``.

    Raises: ValueError when the text does not have the form above.
    """
    action, *rest = text.split(":")
    if action not in ACTIONS or not rest:
        raise ValueError(f"VERL_FAULT={text!r} must be action:point[:rank=N][:step=N] with an action of {ACTIONS}")
    options: dict[str, int] = {}
    for part in rest[1:]:
        key, _, value = part.partition("=")
        if key not in ("rank", "step") or not value.lstrip("-").isdigit():
            raise ValueError(f"VERL_FAULT={text!r}: {part!r} must be rank=N or step=N")
        options[key] = int(value)
    if action == "skip" and (rest[0] not in SKIPPABLE or "rank" in options):
        raise ValueError(f"VERL_FAULT={text!r}: skip is for {', '.join(SKIPPABLE)}, on all ranks: leave rank out")
    return Fault(action, rest[0], **options)


def fault_point(point: str, *, rank: int, step: int | None = None) -> None:
    """Fire the configured fault if it is meant for this point, rank and step; do nothing otherwise."""
    fault = _take(point, rank, step, skip=False)
    if fault is None:
        return
    if fault.action == "raise":
        raise InjectedFault(f"injected at {point}, rank {rank}, step {step}")
    if fault.action == "slow":
        time.sleep(SLOW_S)
        return
    os.kill(os.getpid(), signal.SIGSTOP if fault.action == "hang" else signal.SIGKILL)


def is_skipped(point: str, *, rank: int, step: int | None = None) -> bool:
    """Say whether the configured fault leaves this point out, this once."""
    return _take(point, rank, step, skip=True) is not None


def _take(point: str, rank: int, step: int | None, skip: bool) -> Fault | None:
    """Return the fault that is meant for this point, recorded and used up."""
    text = envs.read("VERL_FAULT")
    if not text:
        return None
    fault = parse_fault(text)
    meant = fault.point == point and fault.rank in (None, rank) and fault.step in (None, step)
    if not meant or (fault.action == "skip") != skip:
        return None
    if fault.action != "slow":
        envs.remove("VERL_FAULT")
    record = envs.read("VERL_FAULT_FILE")
    if record:
        with open(record, "w") as file:
            file.write(f"{time.time()} {point} rank={rank} step={step}")
            file.flush()
            os.fsync(file.fileno())
    return fault
