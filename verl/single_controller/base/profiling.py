"""Let the driver start and stop the profiler of a worker."""

from typing import TYPE_CHECKING, Any

from verl.single_controller.base.decorator import Dispatch, register

if TYPE_CHECKING:
    from verl.utils.profiler.profile import DistProfiler, RoleProfilers


class DistProfilerExtension:
    """A mixin of workers; ``profiler`` is None if nothing is profiled."""

    profiler: "DistProfiler | RoleProfilers | None" = None

    def __init__(self, profiler: "DistProfiler | RoleProfilers | None" = None) -> None:
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
