"""Inject faults, so that tests can prove how a run reacts when a process dies or hangs.

``VERL_FAULT`` holds ``action:point[:key=value]...``, such as ``kill:update_actor:rank=1:step=2``. Actions are ``kill``
(SIGKILL to the own process), ``hang`` (SIGSTOP), ``raise`` (an exception), ``slow`` (half a second of sleep) and, for
``weight_sync`` only, ``skip`` (on all ranks). A fault fires once, except ``slow``, which fires each time. Before it
fires it writes the time to ``VERL_FAULT_FILE``, as proof that the run entered the phase.
"""

import os
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verl.utils import envs

ACTIONS = ("kill", "hang", "raise", "slow", "skip")
SLOW_S = 0.5
SKIPPABLE = ("weight_sync",)


@dataclass(frozen=True)
class Fault:
    """One fault: its action, the named point where it fires, and its rank and step (None for any)."""

    action: str
    point: str
    rank: int | None = None
    step: int | None = None


class InjectedFault(RuntimeError):
    """The exception of the ``raise`` action."""


@cache
def parse_fault(text: str) -> Fault:
    """Parse the value of ``VERL_FAULT``.

    Raises: ValueError for a malformed value.
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
        raise ValueError(f"VERL_FAULT={text!r}: skip works for {', '.join(SKIPPABLE)} and on all ranks only; omit rank")
    return Fault(action, rest[0], **options)


def fault_point(point: str, *, rank: int, step: int | None = None) -> None:
    """Fire the configured fault if it matches this point, rank and step."""
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
    """Return whether the configured fault skips this point now; it does so once."""
    return _take(point, rank, step, skip=True) is not None


def _take(point: str, rank: int, step: int | None, skip: bool) -> Fault | None:
    """Return the fault that matches this point, after recording and clearing it."""
    text = envs.read("VERL_FAULT")
    if not text:
        return None
    fault = parse_fault(text)
    matches = fault.point == point and fault.rank in (None, rank) and fault.step in (None, step)
    if not matches or (fault.action == "skip") != skip:
        return None
    if fault.action != "slow":
        envs.remove("VERL_FAULT")
    record = envs.read("VERL_FAULT_FILE")
    if record:
        Path(record).write_text(f"{time.time()} {point} rank={rank} step={step}")
    return fault
