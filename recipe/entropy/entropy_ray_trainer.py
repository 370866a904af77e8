"""The training loop of DAPO, with metrics of the covariances that drive the policy's entropy."""

from torch import Tensor

from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer
from verl.algos.policy_loss import Whole, token_covariances
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.ray_trainer import Metrics, Timing


class RayEntropyTrainer(RayDAPOTrainer):
    """DAPO's loop that also reports the covariance of log-probability and advantage.

    The losses that control the entropy, ``clip_cov`` and ``kl_cov``, are part of the main trainer.

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617).
    """

    def shape(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute advantages, then measure the covariances under the policy that sampled the responses."""
        batch = super().shape(batch, metrics, timing)
        tensors = tensors_of(batch)
        name = next((key for key in ("old_log_probs", "rollout_log_probs") if key in tensors.keys()), None)
        if name is not None:
            loss = self.run_config.actor_rollout_ref.actor.policy_loss
            bounds = (loss.clip_cov_lb, loss.clip_cov_ub)
            metrics.update(covariance_metrics(tensors[name], tensors["advantages"], tensors["response_mask"], bounds))
        return batch


def covariance_metrics(
    log_prob: Tensor, advantages: Tensor, response_mask: Tensor, bounds: tuple[float | None, float | None]
) -> Metrics:
    """Return metrics of the covariances of a step's tokens; the tensors are (B, T).

    The paper relates the mean covariance to the change of the entropy: if it is positive, a step along the policy
    gradient lowers the entropy. ``bounds`` are the bounds of ``clip_cov``; None means its defaults.

    Source: arXiv:2505.22617, section 3.
    """
    values, count = token_covariances(log_prob, advantages, response_mask, Whole())
    if not count:
        return {}
    tokens = values[response_mask.bool()]
    lower = 1.0 if bounds[0] is None else bounds[0]
    upper = 5.0 if bounds[1] is None else bounds[1]
    return {
        "actor/covariance/mean": tokens.mean().item(),
        "actor/covariance/max": tokens.max().item(),
        "actor/covariance/share_in_bounds": ((tokens > lower) & (tokens < upper)).float().mean().item(),
    }
