"""Reports of the ranks in the record of a step, with digests of weights and random states."""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from verl.utils.observe.record import WorkerReport


class Digests(TypedDict):
    """Digests of a rank: its random state, its part of the weights if it has any, and its part of the batch."""

    random_state: str
    weights: NotRequired[str]
    batch: NotRequired[dict[str, str]]


class RankReport(WorkerReport):
    """A rank's report, with its digests if they were asked for."""

    digests: NotRequired[Digests]


def take_digests(workers: Mapping[str, Sequence[RankReport]]) -> dict[str, dict[str, str]]:
    """Move the digests out of the reports of all ranks, by group, into the phases ``weights`` and ``random state``."""
    weights: dict[str, str] = {}
    states: dict[str, str] = {}
    for group, reports in workers.items():
        for report in reports:
            digests = report.pop("digests")
            name = f"{group}, rank {report['rank']}"
            states[name] = digests["random_state"]
            if "weights" in digests:
                weights[name] = digests["weights"]
    return {"weights": weights, "random state": states}
