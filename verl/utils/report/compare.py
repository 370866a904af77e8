"""Where two runs part: the first step and phase of which the digests differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.report.folder import record_of
from verl.utils.run_record import Entry, read_entries

VOLATILE = ("timing_s/", "timing_per_token_ms/", "perf/", "weight_sync/")
"""Metrics of time and memory: two equal runs may differ in them."""
RANDOM_STATE = "random state"


@dataclass(frozen=True)
class Difference:
    """The first step and phase that differ, and what of the phase."""

    step: int
    phase: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}: {', '.join(self.parts)} differ"


@dataclass(frozen=True)
class Comparison:
    """How far two records were compared, and where they part (None where they do not)."""

    steps: tuple[int, ...]
    by_digests: bool
    difference: Difference | None


class NothingToCompareError(ValueError):
    """Two records have no step in common."""


def compare_runs(run_a: str | Path, run_b: str | Path) -> Comparison:
    """Compare two runs over the steps that both have recorded, by digests or, where a run has none, by metrics.

    Raises: FileNotFoundError where a folder holds no record; NothingToCompareError, a ValueError.
    """
    records = [read_entries(record_of(run)) for run in (run_a, run_b)]
    common = sorted(set(records[0]) & set(records[1]))
    if not common:
        raise NothingToCompareError(f"{run_a} and {run_b} have recorded no step in common")
    trained = [step for step in common if step > 0]
    by_digests = bool(trained) and all("phases" in record[step] for record in records for step in trained)
    begun = trained[0] if by_digests else None
    own = set() if begun is None else set(_unequal(*(r[begun]["phases"].get(RANDOM_STATE, {}) for r in records)))
    for step in common:
        for phase, parts in _differing(records[0][step], records[1][step], by_digests):
            if phase == RANDOM_STATE and own >= set(parts):
                continue  # of ranks whose generators began unlike: nothing has seeded them
            return Comparison(tuple(common), by_digests, Difference(step, phase, tuple(parts)))
    return Comparison(tuple(common), by_digests, None)


def _differing(a: Entry, b: Entry, by_digests: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each phase in which two entries of a step differ, in the order in which phases run."""
    if by_digests:
        first, second = a.get("phases", {}), b.get("phases", {})
        for phase in [*first, *(name for name in second if name not in first)]:
            parts = _unequal(first.get(phase, {}), second.get(phase, {}))
            if parts:
                yield phase, parts
    metrics = [{k: v for k, v in entry["data"].items() if not k.startswith(VOLATILE)} for entry in (a, b)]
    parts = _unequal(*metrics)
    if parts:
        yield "metrics", parts


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [key for key in [*a, *(key for key in b if key not in a)] if repr(a.get(key)) != repr(b.get(key))]
