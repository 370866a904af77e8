"""Import path of the established verl interface for the timers of ``verl.utils.profiler.ranges``."""

from verl.utils.profiler.ranges import reduce_timing as reduce_timing
from verl.utils.profiler.ranges import simple_timer as simple_timer
from verl.utils.profiler.ranges import topk_reduce_ratio_min_max as topk_reduce_ratio_min_max
