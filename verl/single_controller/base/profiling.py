"""Let the driver start and stop the profiler of a worker."""

from typing import Any, Protocol

from verl.single_controller.base.decorator import Dispatch, register


class StepProfiler(Protocol):
    """A ``DistProfiler`` or a ``RoleProfilers``."""

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step."""

    def stop(self) -> None:
        """End the step and write the capture."""

    def step(self) -> None:
        """Note the end of a mini-batch."""


class DistProfilerExtension:
    """A mixin of workers; ``profiler`` is None if nothing is profiled."""

    profiler: StepProfiler | None = None

    def __init__(self, profiler: StepProfiler | None = None) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Begin a step; see ``DistProfiler.start``."""
        if self.profiler is not None:
            self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End the step and write the capture."""
        if self.profiler is not None:
            self.profiler.stop()
