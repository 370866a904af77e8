"""Timers, ranges, memory logs and profilers; names that need torch are imported on first use."""

from verl.utils.import_utils import lazy_exports
from verl.utils.profiler.config import ProfilerConfig
from verl.utils.profiler.ranges import reduce_timing, simple_timer, topk_reduce_ratio_min_max

_LAZY = {
    "DistProfiler": "verl.utils.profiler.profile",
    # The mixin registers methods of workers, so it lives with the workers; this is its established path.
    "DistProfilerExtension": "verl.single_controller.base.worker",
    "GPUMemoryLogger": "verl.utils.profiler.memory",
    "log_gpu_memory_usage": "verl.utils.profiler.memory",
    "mark_annotate": "verl.utils.profiler.ranges",
    "mark_end_range": "verl.utils.profiler.ranges",
    "mark_start_range": "verl.utils.profiler.ranges",
    "marked_timer": "verl.utils.profiler.ranges",
}

__all__ = ["ProfilerConfig", "reduce_timing", "simple_timer", "topk_reduce_ratio_min_max", *sorted(_LAZY)]
__getattr__ = lazy_exports(__name__, _LAZY)
