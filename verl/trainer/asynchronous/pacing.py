"""The pace of asynchronous training: how many groups may be outstanding, and which ones an update takes.

A *group* is the responses to one prompt. Update ``u`` (from 0) trains on ``groups`` of them. Weights are published
after every ``updates`` updates, so the servers have version ``u // updates`` before update ``u``. A token of version
``v`` may be trained while the newest version is at most ``v + bound``: its last update is
``(v + bound + 1) * updates - 1``.

Why the bound can always be kept without dropping work: a group that is sent at version ``v`` leaves room for all
outstanding groups in the updates until its own last one, so by the theorem of earliest deadlines first each has a
place. If a slow response would miss its last update, the trainer waits for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Waiting(NamedTuple):
    """A finished group that waits for its update.

    Attributes:
        order: its place in the order in which groups finished.
        version: the oldest version that sampled one of its tokens.
        number: the place of its prompt in the order of the data.
    """

    order: int
    version: int
    number: int = 0


@dataclass(frozen=True)
class Pace:
    """The pace of a run.

    Attributes:
        groups: groups of one update.
        updates: updates between two publications.
        ahead: groups that may be sent ahead for later versions, as a share of those of one version.
        bound: most versions between the sampling of a token and its update; None without a limit.
        in_order: whether an update takes the groups in the order of the data, whichever finish first.
        drops: whether groups that are too old are dropped, so that neither sending nor training waits for the bound.
    """

    groups: int
    updates: int
    ahead: float
    bound: int | None = None
    in_order: bool = False
    drops: bool = False

    def version(self, update: int) -> int:
        """Return the newest version before an update, if every publication has been made that is due by then."""
        return update // self.updates

    def room(self, version: int, next_update: int, outstanding: int) -> int:
        """Return how many groups may be sent now.

        Args: the version that the servers have, the next update whose groups are not chosen yet, and the groups that
            are sent or finished and in no update.
        """
        ahead = self.ahead if self.bound is None or self.drops else min(self.ahead, self.bound)
        most = math.floor(self.groups * self.updates * (1 + ahead))
        done = self.groups * (next_update - version * self.updates)
        return max(0, most - done - outstanding)

    def last_update(self, version: int) -> int | None:
        """Return the last update that may train a token of a version; None without a limit."""
        return None if self.bound is None else (version + self.bound + 1) * self.updates - 1

    def choose(
        self, update: int, finished: Sequence[Waiting], in_flight: Sequence[int], first_in_flight: int | None = None
    ) -> list[Waiting] | None:
        """Return the groups of an update, those with the oldest tokens first; None if it has to wait.

        Without a limit the first groups that finished are taken. With one, an update also waits until the groups that
        are left, those in flight included, can still be trained in time, unless groups that are too old are dropped; it
        takes none that is too old. In the order of the data, an update waits for all groups before its last one.

        Args: ``in_flight`` are the versions at which the unfinished groups were sent, and ``first_in_flight`` is the
            lowest of their numbers.
        """
        if len(finished) < self.groups:
            return None
        if self.in_order:
            chosen = sorted(finished, key=lambda group: group.number)[: self.groups]
            return chosen if first_in_flight is None or chosen[-1].number < first_in_flight else None
        if self.bound is None:
            return sorted(finished)[: self.groups]
        by_age = sorted(finished, key=lambda group: (group.version, group.order))
        chosen = by_age[: self.groups]
        if self.drops:
            return chosen
        left = [group.version for group in by_age[self.groups :]]
        is_late = self.late([group.version for group in chosen], update) or self.late([*left, *in_flight], update + 1)
        return None if is_late else chosen

    def is_late(self, version: int, update: int) -> bool:
        """Whether an update may no longer train a token of a version."""
        last = self.last_update(version)
        return last is not None and last < update

    def late(self, versions: Sequence[int], first_update: int) -> list[int]:
        """Return the places of those groups that updates from the first on cannot train in time, the oldest first.

        Each update trains ``groups`` of them. Without a limit no group is late.
        """
        if self.bound is None:
            return []
        order = sorted(range(len(versions)), key=versions.__getitem__)
        late: list[int] = []
        for rank, place in enumerate(order):
            update = first_update + (rank - len(late)) // self.groups
            if self.is_late(versions[place], update):
                late.append(place)
        return late
