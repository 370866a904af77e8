"""The training loop with dynamic sampling."""

from collections.abc import Iterator

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.loaders import Rows
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing
from verl.workers.rollout.base import DROPPED_COLUMN

from .dynamic_sampling import Draws, metric_values, varied_groups


class RayDAPOTrainer(RayPPOTrainer):
    """PPO on prompts whose responses differ; only ``collect`` is overridden.

    The other parts of DAPO (clip-higher, token-level loss, overlong penalty) are keys of the main trainer.

    Source: DAPO (arXiv:2503.14476), section 3.2.
    """

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Draw, generate and score prompts until ``train_batch_size`` of them are kept, and return their responses.

        Surplus prompts are dropped, so that only the position in the data goes from step to step.

        Raises: WrongInput when the limit on draws is reached, or when a whole pass over the data kept none.
        """
        groups = self.run_config.algorithm.filter_groups
        if groups is None or not groups.enable:
            metrics["train/num_gen_batches"] = 1
            return super().collect(rows, metrics, timing)
        state = self.state
        draws = Draws(groups, state.step, self.run_config.data.train_batch_size, len(self.train_dataloader))
        parts: list[DataProto] = []
        extras: dict[str, None] = {}  # keeps the order in which the draws brought them
        while not draws.are_enough:
            batch = super().collect(rows, metrics, timing)
            self._add_scores(batch, metrics)
            batch.reorder(torch.tensor(state.row_order))  # so that the rows cut off below do not depend on the ranks
            values = metric_values(batch, groups.metric, state.extra_columns)
            if DROPPED_COLUMN in batch.non_tensor_batch:  # a trajectory that failed has no metric
                values[batch.non_tensor_batch[DROPPED_COLUMN].astype(bool)] = np.nan
            uids = batch.non_tensor_batch["uid"]
            keep = varied_groups(values, uids)
            draws.add(uids, values, keep)
            extras |= dict.fromkeys(state.extra_columns)
            parts.append(batch.select_idxs(keep))
        state.extra_columns = list(extras)
        metrics.update(draws.metrics())
        num_rows = draws.wanted * self.run_config.actor_rollout_ref.rollout.n
        return self._arrange(joined(parts).slice(0, num_rows), metrics)


def joined(parts: list[DataProto]) -> DataProto:
    """Join draws; a column that only some of them have is None in the others."""
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in ("first_prompt", "global_token_num", "images_seqlens"):  # they hold for one draw only
            part.meta_info.pop(name, None)
        for name in columns:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat([part for part in parts if len(part)])
