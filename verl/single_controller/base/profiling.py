"""The calls by which the driver has a worker's profiler start and stop."""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register


class DistProfilerExtension:
    """A mixin of workers.

    Attributes: ``profiler`` is a ``DistProfiler`` or a ``RoleProfilers``, None where nothing is profiled.
    """

    profiler: Any = None

    def __init__(self, profiler: Any = None) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Begin a step; see ``DistProfiler.start``."""
        if self.profiler is not None:
            self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End the step, and write what was captured."""
        if self.profiler is not None:
            self.profiler.stop()
