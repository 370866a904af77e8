"""What a ledger proves of a run: which prompts the final weights were trained on, and how old the tokens were.

``python -m verl.trainer.asynchronous.audit PATH`` checks a ledger or a segment, and prints it.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import cast

import numpy as np

from verl.errors import LedgerError, WrongInput
from verl.trainer.asynchronous.ledger import KINDS, Event, Facts, LedgerReader
from verl.utils.observe.console import get_console


@dataclass
class Audit:
    """The lineage of the final weights, in which the last attempt at each update counts.

    Attributes:
        updates: the numbers of the groups of each update.
        reasons: why a group was given up.
        left: groups that were drawn and are in no update, without a reason: they were under way at the end.
        twice: groups that are in two updates.
        missing: numbers below the largest one that were never drawn; not those before a ledger that begins with a
            resumed run, as after a checkpoint of the main trainer.
        ages: groups by age, the versions between their oldest token and the newest version of their update.
        lengths, scores: tokens and scores of the responses to each prompt, as far as they are known.
    """

    updates: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Audit":
        """Read the events of a ledger, from its start."""
        audit = cls()
        drawn: set[int] = set()
        oldest: dict[int, dict[int, int]] = {}
        lengths: dict[int, dict[int, int]] = {}
        start = 0
        newest: dict[int, int] = {}
        for event in events:
            facts = cast(Facts, event.facts)
            if event.kind == "drawn":
                drawn.add(facts["number"])
            elif event.kind == "resumed" and not drawn:
                start = facts["drawn"]
            elif event.kind == "finished":
                oldest.setdefault(facts["number"], {})[facts["sample"]] = facts["span"][0]
                lengths.setdefault(facts["number"], {})[facts["sample"]] = facts["length"]
            elif event.kind == "scored":
                audit.scores[facts["number"]] = facts.get("scores", [])
            elif event.kind in ("failed", "filtered", "dropped"):
                audit.reasons[facts["number"]] = facts["reason"]
            elif event.kind == "batch":
                audit.updates[facts["update"]] = facts["numbers"]
                newest[facts["update"]] = facts["version"]
        audit.lengths = {number: list(of_group.values()) for number, of_group in lengths.items()}
        trained = Counter(number for numbers in audit.updates.values() for number in numbers)
        audit.twice = sorted(number for number, count in trained.items() if count > 1)
        audit.left = sorted(drawn - trained.keys() - audit.reasons.keys())
        known = range(start, max(drawn | trained.keys(), default=-1) + 1)
        audit.missing = sorted(set(known) - drawn)
        audit.ages = Counter(
            newest[update] - min(oldest[number].values())
            for update, numbers in audit.updates.items()
            for number in numbers
            if number in oldest
        )
        return audit

    @property
    def is_exact(self) -> bool:
        """Whether every prompt up to the last one was drawn, and none was trained twice."""
        return not self.twice and not self.missing

    def lines(self) -> list[str]:
        """Describe the run, a fact per line."""
        trained = {number for numbers in self.updates.values() for number in numbers}
        lengths = [length for of_group in self.lengths.values() for length in of_group]
        of_trained = [length for number in trained for length in self.lengths.get(number, ())]
        means = [mean(self.scores[number]) for number in trained if self.scores.get(number)]
        updates = f"updates: {len(self.updates)}, of {sum(map(len, self.updates.values()))} groups"
        ages = ", ".join(f"{count} of {age}" for age, count in sorted(self.ages.items())) or "none"
        return [
            updates,
            f"ages in versions: {ages}",
            f"lengths generated: {_spread(lengths)}",
            f"lengths trained: {_spread(of_trained)}",
            f"mean score of a group trained: {_spread(means)}",
            f"given up: {len(self.reasons)}; under way at the end: {len(self.left)}",
            f"trained twice: {self.twice or 'none'}; never drawn: {self.missing or 'none'}",
        ]


def _spread(values: Sequence[float]) -> str:
    """Describe a distribution; a scorer may return numbers that are not finite, which are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "none"
    low, middle, high = np.quantile(finite, (0.1, 0.5, 0.9)).tolist()
    return f"mean {mean(finite):.4g}, tenth {low:.4g}, median {middle:.4g}, last tenth {high:.4g}"


def main(arguments: list[str] | None = None) -> int:
    """Check a ledger or a segment, print what it says, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m verl.trainer.asynchronous.audit",
        description="Check that no event of a ledger or segment was changed, count its events, and audit the run.",
        epilog="The exit code is 1 if an event was changed or is missing, or if a prompt was trained twice or never "
        "drawn, and 2 if the file is no ledger.",
    )
    parser.add_argument("path", type=Path, help="ledger of a run, or segment in a checkpoint")
    given = parser.parse_args(arguments)
    try:
        with LedgerReader(given.path) as reader:
            reader.verify()
            _print_summary(reader)
            return 0 if reader.base_seq else _print_audit(reader)
    except LedgerError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, WrongInput) else 1


def _print_summary(reader: LedgerReader) -> None:
    console = get_console()
    counts: Counter[str] = Counter()
    first = last = None
    for last in reader.events():
        counts[last.kind] += 1
        first = first or last
    console.info("%s: %d events from number %d on, unchanged", reader.path, counts.total(), reader.base_seq + 1)
    for kind in KINDS:
        if kind in counts:
            console.info("%10s %d", kind, counts[kind])
    if first and last:
        console.info("%10s %s\n%10s %s", "first", _shown(first.time_ns), "last", _shown(last.time_ns))


def _print_audit(reader: LedgerReader) -> int:
    audit = Audit.of(reader.events())
    for line in audit.lines():
        get_console().info("%s", line)
    return 0 if audit.is_exact else 1


def _shown(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
