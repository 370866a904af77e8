"""The manager of agent loops as the trainer uses it: None without one, and that of a fork need not have each method."""

from typing import Any

from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.timeline import Part

Manager = Any
"""``AgentLoopManager``, the class of a fork, or None."""


def wait_until_ready(manager: Manager) -> None:
    """Wait until the actors that run agent loops have started."""
    if hasattr(manager, "wait_until_ready"):
        manager.wait_until_ready()


def flush_traces(manager: Manager) -> None:
    """Wait until the actors have sent their traces."""
    if hasattr(manager, "flush_traces"):
        manager.flush_traces()


def take_attempts(manager: Manager) -> list[AttemptLine]:
    """Return the account of the attempts since the last call."""
    attempts: list[AttemptLine] = manager.take_attempts() if hasattr(manager, "take_attempts") else []
    return attempts


def take_timeline(manager: Manager) -> list[Part]:
    """Return what the actors have recorded since the last call."""
    parts: list[Part] = manager.take_timeline() if hasattr(manager, "take_timeline") else []
    return parts
