"""What a ledger proves of a run: which prompts the final weights were trained on, and how old the tokens were."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict, cast

from verl.trainer.asynchronous.ledger import Event


class _Facts(TypedDict):
    """The facts of the events that are read, each of which has some."""

    number: int
    update: int
    numbers: list[int]
    version: int
    reason: str


@dataclass
class Audit:
    """The lineage of the final weights, in which the last attempt at each update counts.

    Attributes:
        updates: the numbers of the groups of each update.
        reasons: why a group was given up.
        left: groups that were drawn and are in no update, without a reason: they were under way at the end.
        twice: groups that are in two updates.
        missing: groups of an update, or numbers below the largest one, that were never drawn.
        ages: groups by age, the versions between their oldest token and the newest version of their update.
    """

    updates: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Audit":
        """Read the events of a ledger, from its start."""
        audit = cls()
        drawn: set[int] = set()
        oldest: dict[int, int] = {}
        newest: dict[int, int] = {}
        for event in events:
            facts = cast(_Facts, event.facts)
            if event.kind == "drawn":
                drawn.add(facts["number"])
            elif event.kind == "finished":
                oldest[facts["number"]] = facts["version"]
            elif event.kind in ("failed", "filtered", "dropped"):
                audit.reasons[facts["number"]] = facts["reason"]
            elif event.kind == "batch":
                audit.updates[facts["update"]] = facts["numbers"]
                newest[facts["update"]] = facts["version"]
        trained = Counter(number for numbers in audit.updates.values() for number in numbers)
        audit.twice = sorted(number for number, count in trained.items() if count > 1)
        audit.left = sorted(drawn - trained.keys() - audit.reasons.keys())
        known = range(max(drawn | trained.keys(), default=-1) + 1)
        audit.missing = sorted(set(known) - drawn)
        audit.ages = Counter(
            newest[update] - oldest[number]
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
        updates = f"updates: {len(self.updates)}, of {sum(map(len, self.updates.values()))} groups"
        ages = ", ".join(f"{count} of {age}" for age, count in sorted(self.ages.items())) or "none"
        return [
            updates,
            f"ages in versions: {ages}",
            f"given up: {len(self.reasons)}; under way at the end: {len(self.left)}",
            f"trained twice: {self.twice or 'none'}; never drawn: {self.missing or 'none'}",
        ]
