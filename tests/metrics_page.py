"""What ``docs/metrics.md`` says of every metric, for the tests that hold it against runs and code."""

import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


@dataclass(frozen=True)
class Metric:
    """One name, or a pattern of names, of the page."""

    name: str
    unit: str
    definition: str
    there: str

    def matches(self, name: str) -> bool:
        """Tell whether a logged metric is meant; ``<...>`` stands for anything."""
        parts = re.split(r"<[a-z]+>", self.name)
        return re.fullmatch(".+".join(map(re.escape, parts)), name) is not None


def _expanded(name: str) -> list[str]:
    parts = [part.split(",") if at % 2 else [part] for at, part in enumerate(re.split(r"[{}]", name))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@cache
def metrics() -> tuple[Metric, ...]:
    """Return every name of the page, those with alternatives written out."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            names = [each for name in re.findall(r"`([^`]+)`", cells[0]) for each in _expanded(name)]
            found += [Metric(name, *cells[1:]) for name in names]
    return tuple(found)


def unknown(names: set[str]) -> set[str]:
    """Return the metrics that the page does not name."""
    return {name for name in names if not any(metric.matches(name) for metric in metrics())}


def promised(*there: str) -> set[str]:
    """Return the names that are in every step of a run for which the given words of the last column hold."""
    return {metric.name for metric in metrics() if metric.there in there}
