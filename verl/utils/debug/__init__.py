"""Import path of the established verl interface for the timers, marks and profilers of ``verl.utils.profiler``."""

from verl.utils import profiler
from verl.utils.import_utils import lazy_exports

__all__ = list(profiler.__all__)
__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, "verl.utils.profiler"))
