"""The training loop of online DPO: preferences instead of advantages, and a reference that follows the policy."""

from typing import Any

from verl.base_config import build_node
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing, for_model, without_metrics
from verl.trainer.ppo.segments import without_segments

from .config import SPINTrainerConfig
from .core_algos import compute_onlineDPO_pref, of_whole_pairs
from .dp_actor import CHOSEN


class RaySPINTrainer(RayPPOTrainer):
    """Self-play: the policy answers each prompt twice and learns to prefer the better answer.

    Source: SPIN (arXiv:2401.01335), with the reward function as the judge.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shared = self.run_config.actor_rollout_ref
        self.ref_update_freq = build_node(self.config.trainer, SPINTrainerConfig).ref_update_freq
        if shared.rollout.n % 2:
            raise WrongInput(
                f"actor_rollout_ref.rollout.n={shared.rollout.n}: must be even, since two responses are a pair"
            )
        if shared.model.lora_rank and self.ref_update_freq:
            raise WrongInput(
                f"trainer.ref_update_freq={self.ref_update_freq}: with adapters (actor_rollout_ref.model.lora_rank) "
                "the reference is the base model, which does not change: write 0"
            )

    def fit_dpo(self) -> None:
        """Train until the last step; the established name of ``fit``."""
        self.fit()

    def split_segments(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Keep only the last segment of each trajectory."""
        return without_segments(batch, "SPIN compares whole responses in pairs")

    def infer(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute the log-probabilities of the policy and of the reference."""
        with self._timed("policy_log_prob", timing):
            batch = self._add_old_log_probs(batch, metrics)
        with self._timed("ref_log_prob_dpo", timing):
            return batch.union(without_metrics(self.actor_rollout_wg.compute_ref_log_prob(for_model(batch)), metrics))

    def shape(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute preferences from scores; the advantage is 1 for tokens of a chosen response, else -1."""
        with self._timed("reward_calc", timing):
            self._add_scores(batch, metrics)
        with self._timed("prepare_dpo_batch", timing):
            tensors = tensors_of(batch)
            mask = tensors["response_mask"] = of_whole_pairs(tensors["response_mask"])
            tensors["token_level_rewards"] = tensors["token_level_scores"].clone()
            chosen = compute_onlineDPO_pref(tensors["token_level_rewards"], mask)
            tensors[CHOSEN] = chosen.long()
            tensors["advantages"] = (tensors[CHOSEN] * 2 - 1).unsqueeze(-1) * mask.float()
            tensors["returns"] = tensors["advantages"]
        return batch

    def update(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Update the policy on the pairs; every ``ref_update_freq`` steps, copy its weights to the reference."""
        with self._timed("update_actor", timing):
            without_metrics(self.actor_rollout_wg.update_actor_dpo(for_model(batch)), metrics)
        self.state.weights_version += 1
        if self._reference_is_policy():
            with self._timed("update_reference", timing):
                self.actor_rollout_wg.update_reference()
        return batch

    def _reference_is_policy(self) -> bool:
        """Whether the reference copies the policy's weights at the end of this step."""
        return self.ref_update_freq > 0 and self.state.step % self.ref_update_freq == 0

    def _load_checkpoint(self) -> int | None:
        """Restore the run and the reference.

        A checkpoint has no reference if it equals the policy, which is copied here, or if it has the initial weights.
        """
        resumed = super()._load_checkpoint()
        if resumed and self._reference_is_policy():
            self.actor_rollout_wg.update_reference()
        return resumed

    def _finish_step(self, batch: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Publish the metrics of the step, with its duration also as ``time/step``, the established name."""
        metrics["time/step"] = timing["step"]
        super()._finish_step(batch, metrics, timing)
