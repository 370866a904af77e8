"""The base class of evaluation tasks."""

from collections.abc import Callable
from dataclasses import dataclass

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet


@dataclass(frozen=True)
class Part:
    """One of the data sets of a task; ``folder`` is its path within the task's local folder."""

    data_source: str
    raw: RawSet
    folder: str = ""


@dataclass(frozen=True)
class Task:
    """A task of the evaluation; ``problem`` converts a raw row and its index to the prompt and the ground truth."""

    ability: str
    parts: tuple[Part, ...]
    problem: Callable[[Row, int], tuple[str, str]]
    compute_score: Callable[[str, str], float]
