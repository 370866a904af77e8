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
    """PPO on prompts whose responses differ in a metric; only ``collect`` is overridden.

    The other parts of DAPO (clip-higher, token-level loss, overlong penalty) are keys of the main trainer.

    Source: DAPO (arXiv:2503.14476), section 3.2.
    """

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Draw, generate and score prompts until ``train_batch_size`` of them are kept, and return their responses.

        Surplus prompts are dropped rather than kept for the next step, so that a checkpoint needs only the position in
        the data.

        Raises: WrongInput when the limit on draws is reached, or when too many draws in a row kept no prompt.
        """
        groups = self.run_config.algorithm.filter_groups
        if groups is None or not groups.enable:
            metrics["train/num_gen_batches"] = 1
            return super().collect(rows, metrics, timing)
        state = self.state
        draws = Draws(groups, state.step, self.run_config.data.train_batch_size, len(self.train_dataloader))
        parts: list[DataProto] = []
        extras: dict[str, None] = {}  # names of extra reward columns, a dict to keep their order
        while not draws.are_enough:
            batch = super().collect(rows, metrics, timing)
            self._add_scores(batch, metrics)
            # Undo the balancing over ranks, so that it does not decide which rows are cut off below.
            batch.reorder(torch.tensor(state.row_order))
            values = metric_values(batch, groups.metric, state.extra_columns)
            if DROPPED_COLUMN in batch.non_tensor_batch:  # a failed trajectory has no metric
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
    """Concatenate draws; where a draw lacks a column of another one, its rows get None."""
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in ("first_prompt", "global_token_num", "images_seqlens"):  # valid for one draw only
            part.meta_info.pop(name, None)
        for name in columns:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat([part for part in parts if len(part)])
