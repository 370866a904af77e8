"""Import path of ``PrimeRewardManager``, and of scoring in processes, in the established verl interface."""

from verl.utils.import_utils import lazy_exports
from verl.workers.rewards.managers import PrimeRewardManager as PrimeRewardManager

_SCORING = ("parallel_compute_score_async", "run_reward_scoring")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_SCORING, "verl.compat.prime_scoring"))
