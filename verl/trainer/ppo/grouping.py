"""Samples of a prompt on one rank, which then computes the prompt once (``model.use_prefix_sharing``)."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from verl.utils.seqlen_balancing import Partition


class Groups(NamedTuple):
    """By row: its group, whose rows have the same prompt, and the tokens of its prompt and response."""

    names: Sequence[Hashable]
    prompts: Sequence[int]
    responses: Sequence[int]

    def filled(self, count: int) -> "Groups":
        """Return these and ``count`` more rows of one token, each a group of its own."""
        others: list[Hashable] = [f"fills place {at}" for at in range(count)]
        return Groups([*self.names, *others], [*self.prompts, *[1] * count], [*self.responses, *[0] * count])

    def distinct_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens that rows of one group have if their prompt counts once."""
        return max(self.prompts[row] for row in rows) + sum(self.responses[row] for row in rows)


def keep_groups(ranks: Partition, groups: Groups, stretch: int) -> Partition:
    """Exchange rows between ranks so that those of a group stand together, and ranks compute about the same.

    The rows at places ``k * stretch`` to ``(k + 1) * stretch`` of all ranks together stay the same, so mini-batches of
    ``stretch`` rows of each rank keep their members. Whole groups go to the rank that has the fewest distinct tokens so
    far, the largest group first; a group that fits nowhere is cut.

    Args:
        ranks: the rows of each rank, all of one length, which ``stretch`` divides.
        groups: of all rows.
    """
    size = len(ranks[0])
    placed: Partition = [[] for _ in ranks]
    for first in range(0, size, stretch):
        members: dict[Hashable, list[int]] = {}
        for row in sorted(row for part in ranks for row in part[first : first + stretch]):
            members.setdefault(groups.names[row], []).append(row)
        costs = {group: groups.distinct_tokens(rows) for group, rows in members.items()}
        loads = [0] * len(ranks)
        rooms = [stretch] * len(ranks)
        parts: Partition = [[] for _ in ranks]
        for group in sorted(members, key=lambda each: (-costs[each], members[each][0])):
            rows = members[group]
            while rows:
                fitting = [rank for rank in range(len(ranks)) if rooms[rank] >= len(rows)]
                if fitting:
                    rank = min(fitting, key=lambda each: (loads[each], each))
                else:
                    rank = max(range(len(ranks)), key=lambda each: (rooms[each], -loads[each], -each))
                taken = rows[: rooms[rank]]
                rows = rows[rooms[rank] :]
                parts[rank] += taken
                rooms[rank] -= len(taken)
                loads[rank] += groups.distinct_tokens(taken)
        for whole, part in zip(placed, parts, strict=True):
            whole += sorted(part)
    return placed
