"""Helpers under the established names of ``verl.utils.memory_utils``, for workers of users' forks."""

import gc
import logging

from verl.utils.device import get_device_name, get_torch_device, set_expandable_segments
from verl.utils.memory_utils import get_memory_info

logger = logging.getLogger(__name__)

_GIB = 1024**3


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Return unused memory to the device; repeat until no more is freed."""
    if get_device_name() == "cpu":
        gc.collect()
        return
    device = get_torch_device()
    for _ in range(max_retries):
        before = device.memory_reserved()
        gc.collect()
        device.empty_cache()
        if force_sync:
            device.synchronize()
        if before - device.memory_reserved() < _GIB:
            return


def reset_memory_stats() -> None:
    """Reset the peak memory counters."""
    if get_device_name() != "cpu":
        get_torch_device().reset_peak_memory_stats()


def log_memory_usage(stage: str = "current") -> None:
    """Log the memory of this process and its device."""
    logger.info("%s: %s", stage, ", ".join(f"{name}={value:.2f}" for name, value in get_memory_info().items()))


def optimize_memory_for_inference() -> None:
    """Free memory for a rollout engine, whose sleep mode cannot use expandable segments."""
    set_expandable_segments(False)
    aggressive_empty_cache()


def optimize_memory_for_training() -> None:
    """Use expandable segments, and free memory that a rollout engine has left."""
    set_expandable_segments(True)
    aggressive_empty_cache(force_sync=False)
