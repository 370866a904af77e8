"""The tasks of the evaluation, each with its data, its prompt and its scorer."""

from . import gpqa, livecodebench, math_reward
from .task import Task as Task

TASKS: dict[str, Task] = {
    "aime2024": math_reward.AIME_2024,
    "gpqa_diamond": gpqa.GPQA_DIAMOND,
    "cnmo2024": math_reward.CNMO_2024,
    "livecodebench": livecodebench.LIVECODEBENCH,
}
"""The tasks by their names on the command line."""
