"""The arguments of each reward manager and of its calls of a scorer, and the check that a scorer takes them.

This module imports nothing heavy: the launching process uses it on the source of a scorer, before torch is loaded.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

Example = tuple[tuple[str, ...], dict[str, str]]
"""Arguments of a scorer: those by position, and those by name."""


@dataclass(frozen=True)
class ScorerCall:
    """The names of the arguments of a scorer, and whether the manager passes them by position."""

    arguments: tuple[str, ...]
    by_position: bool = False

    def example(self) -> Example:
        """Return empty arguments in the form of this call."""
        keywords = dict.fromkeys(self.arguments, "")
        return (tuple(keywords.values()), {}) if self.by_position else ((), keywords)


def call_problem(signature: inspect.Signature, example: Example, more_keywords: Iterable[str] = ()) -> str | None:
    """Return why a call does not fit a signature, naming the arguments; None if it fits.

    Args: ``more_keywords`` are the names of ``custom_reward_function.reward_kwargs``.
    """
    positional, keywords = example
    keywords = {**keywords, **dict.fromkeys(more_keywords, "")}
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return f"with ({', '.join([*_ONE_RESPONSE[: len(positional)], *keywords])}): {error}"
    return None


ASYNCHRONOUS = "is asynchronous: define it with `def`"
_ONE_RESPONSE = ("data_source", "solution_str", "ground_truth", "extra_info")

SCORER_CALLS = {
    "naive": ScorerCall(_ONE_RESPONSE),
    "dapo": ScorerCall(_ONE_RESPONSE),
    "batch": ScorerCall(("data_sources", "solution_strs", "ground_truths", "extra_infos")),
    "prime": ScorerCall(_ONE_RESPONSE, by_position=True),
}
"""Manager -> how it calls a scorer."""
ONE_BY_ONE = tuple(name for name, call in SCORER_CALLS.items() if call.arguments == _ONE_RESPONSE)
"""The managers that call a scorer for each response."""
MANAGER_KWARGS: dict[str, tuple[str, ...]] = {
    "naive": (),
    "dapo": ("max_resp_len", "overlong_buffer_cfg"),
    "prime": ("num_processes",),
}
"""The keys that ``reward_model.reward_kwargs`` may hold for each manager; those of ``batch`` go to the scorer."""


def class_in_file(manager: str | None) -> tuple[str, str] | None:
    """Return path and class of a reward manager that is named as ``file.py:Class``; None for a registered name."""
    path, _, name = (manager or "").rpartition(":")
    return (path, name) if path else None
