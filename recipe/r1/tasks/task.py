"""The base class of evaluation tasks."""

from collections.abc import Callable
from dataclasses import dataclass

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet


@dataclass(frozen=True)
class Part:
    """A data set of a task; ``folder`` is its place below the task's folder of a local copy."""

    data_source: str
    raw: RawSet
    folder: str = ""


@dataclass(frozen=True)
class Task:
    """One task: ``problem`` turns a raw row and its index into the prompt and the ground truth."""

    ability: str
    parts: tuple[Part, ...]
    problem: Callable[[Row, int], tuple[str, str]]
    compute_score: Callable[[str, str], float]
