"""Spare prompts, which replace prompts whose trajectories failed (``rollout.agent.on_failure=replace``)."""

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.experimental.agent_loop.rows import joined
from verl.protocol import DataProto
from verl.trainer.ppo.loaders import CollateFn, Rows
from verl.trainer.ppo.rollouts import Sampled
from verl.trainer.ppo.state import RunState
from verl.utils.numerics.seeding import derive_seed, prompt_uids

MOST_ROUNDS = 10
"""How often a step may replace prompts; more would mean that nearly every trajectory fails."""

FIRST_SEED = 2**32
"""The place of the first spare prompt among the prompts of a step, from which its seeds derive; no step has so many."""


class SparePrompts:
    """Spare prompts from the training set, pass after pass, each pass in another random order.

    The orders depend on the seed of the run only. ``state.spares_drawn`` is the position, which checkpoints hold.
    """

    def __init__(self, dataset: Dataset[Rows], collate_fn: CollateFn, state: RunState) -> None:
        self._dataset: Any = dataset  # Any, since the type Dataset has no ``__len__``
        self._collate = collate_fn
        self._state = state

    def draw(self, count: int) -> DataProto:
        """Return the next prompts, each with a ``uid``; meta ``first_prompt`` is the first index for their seeds."""
        state = self._state
        first = self._state.spares_drawn
        size = len(self._dataset)
        rows = [_order(state.seed, at // size, size)[at % size] for at in range(first, first + count)]
        batch = DataProto.from_single_dict(self._collate([self._dataset[row] for row in rows]))
        batch.non_tensor_batch["uid"] = prompt_uids(state.seed, state.step, count, "spare", first)
        batch.meta_info["first_prompt"] = FIRST_SEED + first
        state.spares_drawn += count
        return batch


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(seed, "spare", epoch))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def with_rows(rows: DataProto, others: DataProto, places: Sequence[int]) -> DataProto:
    """Return ``rows`` with row ``k`` of ``others`` at ``places[k]``; both have the same columns."""
    order = list(range(len(rows)))
    for number, place in enumerate(places):
        order[place] = len(rows) + number
    joined = DataProto.concat([rows, DataProto(others.batch, others.non_tensor_batch)])
    return joined.select_idxs(torch.tensor(order))


def rows_of_prompts(prompts: Sequence[int], num_samples: int) -> list[int]:
    """Return the rows of the samples of prompts, when each prompt has ``num_samples`` rows in turn."""
    return [prompt * num_samples + sample for prompt in prompts for sample in range(num_samples)]


def replace_failed(
    batch: DataProto,
    sampled: Sampled,
    spares: SparePrompts,
    sample: Callable[[DataProto], Sampled],
    num_samples: int,
    step: int,
) -> tuple[DataProto, Sampled]:
    """Replace the prompts that the column ``replace`` of the responses marks by spare prompts with responses.

    Raises: RuntimeError when spare prompts fail again and again.
    """
    prompts, output, seeds = sampled
    for rounds in itertools.count():
        failed = set(output.meta_info.pop("replace", ()))
        places = [place for place, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in failed]
        if not places:
            return batch, (prompts, output, seeds)
        if rounds == MOST_ROUNDS:
            break
        spare = spares.draw(len(places))
        their_prompts, spare_output, spare_seeds = sample(spare)
        rows = rows_of_prompts(places, num_samples)
        batch = with_rows(batch, spare, places)
        prompts = with_rows(prompts, their_prompts, places)
        again = spare_output.meta_info.pop("replace", ())
        seeds = seeds.clone()
        seeds[rows] = spare_seeds
        kept = [row for row in range(len(output)) if row not in set(rows)]
        meta_info = output.meta_info
        output.meta_info = {}
        spare_output.meta_info = {}
        together = joined([output.select_idxs(torch.tensor(kept, dtype=torch.int64)), spare_output])
        output = together.select_idxs(torch.tensor(np.argsort([*kept, *rows], kind="stable")))
        output.meta_info = meta_info | ({"replace": again} if again else {})
    raise RuntimeError(
        f"step {step}: {len(places)} prompts were replaced {MOST_ROUNDS} times, and agent loops "
        "fail for the spare ones too: see attempts.jsonl in the folder of the run for the reasons"
    )
