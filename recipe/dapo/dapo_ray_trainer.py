"""The training loop with dynamic sampling."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from recipe.dapo.dynamic_sampling import Draws, metric_values, varied_groups
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing


class RayDAPOTrainer(RayPPOTrainer):
    """PPO on prompts whose responses differ: ``collect`` is all that is changed.

    The other parts of DAPO (clip-higher, token-level loss, overlong penalty) are keys of the main trainer.

    Source: DAPO (arXiv:2503.14476), section 3.2.
    """

    def collect(self, rows: Iterator[Mapping[str, Any]], metrics: Metrics, timing: Timing) -> DataProto:
        """Draw, answer and score prompts until ``train_batch_size`` of them are kept, and return their responses.

        What is kept beyond that number is dropped, so that nothing but the place in the data goes from step to step.

        Raises: NoVariedPromptsError when the limit on draws is reached, or the whole data set gives nothing to keep.
        """
        groups = self.config.algorithm.get("filter_groups")
        if not groups or not groups.enable:
            metrics["train/num_gen_batches"] = 1
            return super().collect(rows, metrics, timing)
        draws = Draws(self.config, self.global_steps, len(self.train_dataloader))
        parts: list[DataProto] = []
        extras: dict[str, None] = {}  # in the order in which they were met
        while not draws.are_enough:
            batch = super().collect(rows, metrics, timing)
            self._add_scores(batch, metrics)
            batch.reorder(torch.tensor(self._row_order))  # what is cut off below must not depend on the ranks
            values, uids = metric_values(batch, groups.metric, self._extra_columns), batch.non_tensor_batch["uid"]
            keep = varied_groups(values, uids)
            draws.add(uids, values, keep)
            extras |= dict.fromkeys(self._extra_columns)
            parts.append(batch.select_idxs(keep))
        self._extra_columns = list(extras)
        metrics.update(draws.metrics())
        num_rows = draws.wanted * self.config.actor_rollout_ref.rollout.n
        return self._arrange(joined(parts).slice(0, num_rows), metrics)


def joined(parts: list[DataProto]) -> DataProto:
    """Join draws; what the reward function said in some of them only is None in the others."""
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in ("first_prompt", "global_token_num", "images_seqlens"):  # of one draw alone
            part.meta_info.pop(name, None)
        for name in columns:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat([part for part in parts if len(part)])
