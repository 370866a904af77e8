"""Rows for ranks: equal numbers of tokens, and the samples of a prompt on one rank.

Such a rank computes the prompt once (``model.use_prefix_sharing``).
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from verl.models.transformers.packing import packs_rows
from verl.protocol import DataProto, tensors_of
from verl.trainer.config.rules.batch import workers_of_a_shard
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.phases import lengths_of
from verl.utils.seqlen_balancing import Partition, get_seqlen_balanced_partitions, log_seqlen_unbalance


class Groups(NamedTuple):
    """By row: its group, whose rows have the same prompt, and the tokens of its prompt and response."""

    names: Sequence[Hashable]
    prompts: Sequence[int]
    responses: Sequence[int]

    def filled(self, count: int) -> "Groups":
        """Add ``count`` rows of one token to the groups, each row as a group of its own."""
        others: list[Hashable] = [f"fills place {at}" for at in range(count)]
        return Groups([*self.names, *others], [*self.prompts, *[1] * count], [*self.responses, *[0] * count])

    def distinct_tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of a group whose shared prompt counts once."""
        return max(self.prompts[row] for row in rows) + sum(self.responses[row] for row in rows)


def keep_groups(ranks: Partition, groups: Groups, stretch: int) -> Partition:
    """Exchange rows between ranks so that the rows of a group are on one rank and ranks have about equal work.

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


def groups_of(batch: DataProto, run: RunConfig) -> Groups | None:
    """Return the samples of each prompt, if the roles compute a prompt once for the samples that a rank has.

    None where rows are shuffled, or trained in other mini-batches by the critic.
    """
    actor = run.actor_rollout_ref.actor
    critic = run.critic
    model = run.actor_rollout_ref.model
    shares = model.use_prefix_sharing and packs_rows(actor.strategy, model.use_remove_padding)
    if not shares or actor.shuffle or "uid" not in batch.non_tensor_batch:
        return None
    if critic is not None and (critic.shuffle or workers_of_a_shard(critic) != workers_of_a_shard(actor)):
        return None
    prompts, responses = lengths_of(batch)
    return Groups(batch.non_tensor_batch["uid"].tolist(), prompts.tolist(), responses.tolist())


def balanced_order(
    batch: DataProto, run: RunConfig, num_workers: int, prefix: str
) -> tuple[list[int], dict[str, float]]:
    """Return the order of the rows in which every rank gets about the same number of tokens, and metrics of it."""
    lengths = tensors_of(batch)["attention_mask"].sum(-1).tolist()
    # The number of rows need not be a multiple of the number of workers, since some workers share rows. The greatest
    # common divisor of both numbers is a multiple of the number of shards.
    parts = math.gcd(len(lengths), num_workers)
    partitions = get_seqlen_balanced_partitions(lengths, parts, equal_size=True)
    partitions = _with_groups_together(batch, partitions, run, num_workers)
    order = [row for part in partitions for row in part]
    return order, log_seqlen_unbalance(lengths, partitions, prefix=prefix)


def _with_groups_together(batch: DataProto, parts: Partition, run: RunConfig, num_workers: int) -> Partition:
    """Place the samples of a prompt on one rank, if the prompt is then computed only once."""
    actor = run.actor_rollout_ref.actor
    critic = run.critic
    shards = num_workers // workers_of_a_shard(actor)
    # If the rows do not divide over all workers, the workers of a shard may get one part together.
    sharing, rest = divmod(len(parts), shards)
    groups = groups_of(batch, run) if shards > 1 and not rest else None
    if groups is None:
        return parts
    ranks = [[row for part in parts[at : at + sharing] for row in part] for at in range(0, len(parts), sharing)]
    roles = [actor] if critic is None else [actor, critic]
    rows = [role.ppo_mini_batch_size * run.actor_rollout_ref.rollout.n // len(ranks) for role in roles]
    placed = keep_groups(ranks, groups, math.gcd(len(ranks[0]), *rows))
    width = len(parts[0])
    return [part[at : at + width] for part in placed for at in range(0, len(part), width)]
