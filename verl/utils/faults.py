"""Faults on demand, so that tests can prove what a run does when a process dies or hangs.

``VERL_FAULT`` holds ``action:point[:key=value]...``, for instance ``kill:update_actor:rank=1:step=2``. Actions are
``kill`` (SIGKILL to the own process), ``hang`` (SIGSTOP), ``raise`` (an exception). A fault fires once, and writes
the time at which it did to ``VERL_FAULT_FILE`` first, as proof that the phase was entered.
"""

import os
import signal
import time
from dataclasses import dataclass
from functools import cache

from verl.utils import envs

ACTIONS = ("kill", "hang", "raise")


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
    return Fault(action, rest[0], **options)


def fault_point(point: str, *, rank: int, step: int | None = None) -> None:
    """Fire the configured fault if it is meant for this point, rank and step; do nothing otherwise."""
    text = envs.read("VERL_FAULT")
    if not text:
        return
    fault = parse_fault(text)
    if fault.point != point or fault.rank not in (None, rank) or fault.step not in (None, step):
        return
    envs.remove("VERL_FAULT")
    record = envs.read("VERL_FAULT_FILE")
    if record:
        with open(record, "w") as file:
            file.write(f"{time.time()} {point} rank={rank} step={step}")
            file.flush()
            os.fsync(file.fileno())
    if fault.action == "raise":
        raise InjectedFault(f"injected at {point}, rank {rank}, step {step}")
    os.kill(os.getpid(), signal.SIGSTOP if fault.action == "hang" else signal.SIGKILL)
