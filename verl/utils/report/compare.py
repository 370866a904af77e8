"""Compare two runs: find the first step and phase in which their digests or metrics differ."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from verl.errors import WrongInput
from verl.utils.observe.record import Entry, read_entries, record_of

T = TypeVar("T")

VOLATILE = (
    "fully_async/total_wait_time",
    "fully_async/update_overlap",
    "timing_s/", "time/", "timing_per_token_ms/", "tool_time/", "perf/", "weight_sync/", "train/mfu", "train/time",
)  # fmt: skip
"""Prefixes of time and memory metrics, in which two equal runs may differ."""
VALIDATION = ("val-", "val/")
RANDOM_STATE = "random state"
SHOWN = 8
"""Number of differing parts that a message lists."""


@dataclass(frozen=True)
class Difference:
    """The first step and phase that differ, with the names of the differing parts."""

    step: int
    phase: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.parts) - SHOWN} more" if len(self.parts) > SHOWN else ""
        return f"step {self.step}, phase {self.phase}: {', '.join(self.parts[:SHOWN])}{more} differ"


@dataclass(frozen=True)
class Comparison:
    """The compared steps and the first difference; None if the runs are equal."""

    steps: tuple[int, ...]
    by_digests: bool
    difference: Difference | None
    alone: tuple[int, int] = (0, 0)
    """Number of steps that only the first and only the second run recorded."""


def compare_runs(run_a: str | Path, run_b: str | Path) -> Comparison:
    """Compare the steps that both runs recorded, by metrics and, if both have them, by digests.

    Raises: FileNotFoundError if a folder holds no record; WrongInput, a ValueError.
    """
    records = [read_entries(record_of(run)) for run in (run_a, run_b)]
    common = sorted(set(records[0]) & set(records[1]))
    if not common:
        raise WrongInput(
            f"{run_a} and {run_b} have no step in common: the first recorded {_steps(records[0])}, the second "
            f"{_steps(records[1])}"
        )
    trained = [step for step in common if all(_is_trained(record[step]) for record in records)]
    digested = [step for step in trained if all("phases" in record[step] for record in records)]
    by_digests = bool(digested) and digested == trained
    unseeded: set[str] = set()  # ranks whose generators differ from the first step on: nothing seeded them
    if digested:
        states = [record[digested[0]]["phases"].get(RANDOM_STATE, {}) for record in records]
        unseeded = set(_unequal(states[0], states[1]))
    alone = (len(records[0]) - len(common), len(records[1]) - len(common))
    for step in common:
        for phase, parts in _differing(records[0][step], records[1][step]):
            if phase == RANDOM_STATE and unseeded >= set(parts):
                continue
            return Comparison(tuple(common), by_digests, Difference(step, phase, tuple(parts)), alone)
    return Comparison(tuple(common), by_digests, None, alone)


def _steps(entries: Mapping[int, Entry]) -> str:
    return f"steps {min(entries)} to {max(entries)}" if entries else "no step"


def _is_trained(entry: Entry) -> bool:
    """Return whether the step trained. A run's first entry may hold only the validation of its initial weights."""
    return "phases" in entry or any(not key.startswith(VALIDATION) for key in entry["data"])


def _differing(a: Entry, b: Entry) -> Iterator[tuple[str, list[str]]]:
    """Yield each phase in which two entries of a step differ, in the order in which phases run."""
    first = a.get("phases")
    second = b.get("phases")
    if first is not None and second is not None:
        for phase in {**first, **second}:
            parts = _unequal(first.get(phase, {}), second.get(phase, {}))
            if parts:
                yield phase, _by_group(parts, first.get(phase, {}), second.get(phase, {}))
    trained = _is_trained(a) and _is_trained(b)
    # Validation metrics are compared only if both entries have them, since runs may validate at different steps. The
    # same holds for all metrics if an entry is that of the initial weights, which has no training metrics.
    both = a["data"].keys() & b["data"].keys()
    parts = [
        key
        for key in _unequal(a["data"], b["data"])
        if not key.startswith(VOLATILE) and (key in both or (trained and not key.startswith(VALIDATION)))
    ]
    if parts:
        yield "metrics", parts


def _by_group(parts: list[str], *of_runs: Mapping[str, str]) -> list[str]:
    """Name a group instead of its ranks if the two runs have different rank counts, since shards then differ too."""
    ranks = [Counter(name.rpartition(", rank ")[0] for name in each) for each in of_runs]
    named = {}
    for part in parts:
        group = part.rpartition(", rank ")[0]
        counts = [each[group] for each in ranks]
        named[part] = f"{group} ({counts[0]} and {counts[1]} ranks)" if group and counts[0] != counts[1] else part
    return list(dict.fromkeys(named.values()))


def _unequal(a: Mapping[str, T], b: Mapping[str, T]) -> list[str]:
    """Return the keys whose values differ; ``repr`` makes NaN equal to itself."""
    return [key for key in {**a, **b} if repr(a.get(key)) != repr(b.get(key))]
