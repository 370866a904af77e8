"""The calls of a training loop on worker groups and on managers of agent loops."""

from types import MethodType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from verl.single_controller.base.actor import Ref
    from verl.utils.observe.attempts import AttemptLine
    from verl.utils.observe.timeline import Part

T = TypeVar("T")


class Manager:
    """A worker group or a manager of agent loops, as a training loop calls it at every step.

    Each method does nothing by default: workers and managers define those that they have something to do in.
    """

    def wait_until_ready(self) -> None:
        """Wait until all actors have started."""

    def sync_weights(self, step: int | None = None) -> None:
        """Bring the weights of the rollout engine up to date."""

    def start_timeline(self) -> None:
        """Record spans from now on, for the timeline of the step."""

    def report_step(self, digests: bool) -> "list[Ref]":
        """Return references of the reports of all ranks on the step; none without reports."""
        return []

    def take_attempts(self) -> "list[AttemptLine]":
        """Return the account of all attempts since the last call of this method."""
        return []

    def take_timeline(self) -> "list[Part]":
        """Return the spans recorded since the last call of this method."""
        return []

    def flush_traces(self) -> None:
        """Wait until all traces are sent."""


def adapted(manager: T) -> T:
    """Give a manager of a fork that does not derive from ``Manager`` the methods that it lacks, and return it."""
    for name, method in vars(Manager).items():
        if not name.startswith("_") and not hasattr(manager, name):
            setattr(manager, name, MethodType(method, manager))
    return manager
