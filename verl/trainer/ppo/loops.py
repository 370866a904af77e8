"""The manager of agent loops as the trainer uses it: None without one, and that of a fork need not have each method."""

from typing import TYPE_CHECKING

from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.timeline import Part

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager


def wait_until_ready(manager: "AgentLoopManager | None") -> None:
    """Wait until the actors that run agent loops have started."""
    if manager is not None and hasattr(manager, "wait_until_ready"):
        manager.wait_until_ready()


def flush_traces(manager: "AgentLoopManager | None") -> None:
    """Wait until the actors have sent their traces."""
    if manager is not None and hasattr(manager, "flush_traces"):
        manager.flush_traces()


def take_attempts(manager: "AgentLoopManager | None") -> list[AttemptLine]:
    """Return the account of the attempts since the last call."""
    return manager.take_attempts() if manager is not None and hasattr(manager, "take_attempts") else []


def take_timeline(manager: "AgentLoopManager | None") -> list[Part]:
    """Return what the actors have recorded since the last call."""
    return manager.take_timeline() if manager is not None and hasattr(manager, "take_timeline") else []
