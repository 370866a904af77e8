"""Where two runs part: the first step and phase of which the digests differ."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.observe.record import Entry, read_entries
from verl.utils.report.folder import record_of

VOLATILE = ("timing_s/", "timing_per_token_ms/", "perf/", "weight_sync/", "train/mfu", "train/time")
"""Metrics of time and memory: two equal runs may differ in them."""
VALIDATION = ("val-", "val/")
RANDOM_STATE = "random state"
SHOWN = 8
"""Parts of a phase that a message lists."""


@dataclass(frozen=True)
class Difference:
    """The first step and phase that differ, and what of the phase."""

    step: int
    phase: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.parts) - SHOWN} more" if len(self.parts) > SHOWN else ""
        return f"step {self.step}, phase {self.phase}: {', '.join(self.parts[:SHOWN])}{more} differ"


@dataclass(frozen=True)
class Comparison:
    """How far two records were compared, and where they part (None where they do not)."""

    steps: tuple[int, ...]
    by_digests: bool
    difference: Difference | None
    alone: tuple[int, int] = (0, 0)
    """How many steps only one of the two has recorded."""


class NothingToCompareError(ValueError):
    """Two records have no step in common."""


def compare_runs(run_a: str | Path, run_b: str | Path) -> Comparison:
    """Compare two runs over the steps that both have recorded, by metrics and, where both have them, by digests.

    Raises: FileNotFoundError where a folder holds no record; NothingToCompareError, a ValueError.
    """
    records = [read_entries(record_of(run)) for run in (run_a, run_b)]
    common = sorted(set(records[0]) & set(records[1]))
    if not common:
        raise NothingToCompareError(
            f"{run_a} and {run_b} have recorded no step in common: {_steps(records[0])} and {_steps(records[1])}"
        )
    trained = [step for step in common if all(_is_trained(record[step]) for record in records)]
    digested = [step for step in trained if all("phases" in record[step] for record in records)]
    by_digests = bool(digested) and digested == trained
    first = {} if not digested else {run: record[digested[0]]["phases"] for run, record in enumerate(records)}
    own = set(_unequal(*(phases.get(RANDOM_STATE, {}) for phases in first.values()))) if first else set()
    alone = (len(records[0]) - len(common), len(records[1]) - len(common))
    for step in common:
        for phase, parts in _differing(records[0][step], records[1][step]):
            if phase == RANDOM_STATE and own >= set(parts):
                continue  # of ranks whose generators began unlike: nothing has seeded them
            return Comparison(tuple(common), by_digests, Difference(step, phase, tuple(parts)), alone)
    return Comparison(tuple(common), by_digests, None, alone)


def _steps(entries: Mapping[int, Entry]) -> str:
    return f"steps {min(entries)} to {max(entries)}" if entries else "no step"


def _is_trained(entry: Entry) -> bool:
    """Whether a step was trained: an entry may hold only the validation of the weights that a run began with."""
    return "phases" in entry or any(not key.startswith(VALIDATION) for key in entry["data"])


def _differing(a: Entry, b: Entry) -> Iterator[tuple[str, list[str]]]:
    """Yield each phase in which two entries of a step differ, in the order in which phases run."""
    first, second = a.get("phases"), b.get("phases")
    if first is not None and second is not None:
        for phase in [*first, *(name for name in second if name not in first)]:
            parts = _unequal(first.get(phase, {}), second.get(phase, {}))
            if parts:
                yield phase, _by_group(parts, first.get(phase, {}), second.get(phase, {}))
    trained = _is_trained(a) and _is_trained(b)
    metrics = [{key: value for key, value in entry["data"].items() if not key.startswith(VOLATILE)} for entry in (a, b)]
    # when a run validates is no part of its training, and the weights that it began with have no other metrics
    both = metrics[0].keys() & metrics[1].keys()
    metrics = [
        {key: value for key, value in each.items() if key in both or (trained and not key.startswith(VALIDATION))}
        for each in metrics
    ]
    parts = _unequal(*metrics)
    if parts:
        yield "metrics", parts


def _by_group(parts: list[str], *of_runs: Mapping[str, str]) -> list[str]:
    """Name a group instead of its ranks where the runs have not equally many of them: each rank holds other parts."""
    ranks = [Counter(name.rpartition(", rank ")[0] for name in each) for each in of_runs]
    named = {}
    for part in parts:
        group = part.rpartition(", rank ")[0]
        counts = [each[group] for each in ranks]
        named[part] = f"{group} ({counts[0]} and {counts[1]} ranks)" if group and counts[0] != counts[1] else part
    return list(dict.fromkeys(named.values()))


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [key for key in [*a, *(key for key in b if key not in a)] if repr(a.get(key)) != repr(b.get(key))]
