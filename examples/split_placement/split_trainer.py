"""The training loop for an actor and a critic on different devices."""

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing
from verl.utils.metric import reduce_metrics


class RaySplitTrainer(RayPPOTrainer):
    """PPO whose actor and critic update at the same time; only ``update`` is overridden."""

    def update(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Start both updates, then wait for both; during the critic's warm-up, update only the critic.

        The timer ``update_critic`` covers both starts and the wait for the critic, ``update_actor`` the remaining wait
        for the actor. So their sum is the time of the slower update.
        """
        assert self.critic_wg is not None  # check_placement requires a critic
        with_actor = not self.trains_critic_only
        part = batch.select(non_tensor_batch_keys=[n for n in ("multi_modal_inputs",) if n in batch.non_tensor_batch])
        with self._timed("update_critic", timing):
            critic = self.critic_wg.update_critic(part)
            actor = self.actor_rollout_wg.update_actor(part) if with_actor else None
            metrics.update(reduce_metrics(critic.get().meta_info["metrics"]))
        if actor is not None:
            with self._timed("update_actor", timing):
                metrics.update(reduce_metrics(actor.get().meta_info["metrics"]))
            self.state.weights_version += 1
        return batch
