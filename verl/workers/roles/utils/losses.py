"""The losses that the roles hand to an engine: sums over a micro-batch, and what divides them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algos.aggregate import UNITS, Metric, Sum, Unit, agg_sum, agg_unit, count_units
from verl.algos.kl import kl_penalty
from verl.algos.policy_loss import effective_loss_agg_mode, get_policy_loss_fn
from verl.algos.value_loss import compute_value_loss
from verl.workers.roles.utils.mismatch import mismatch_metrics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig, CriticConfig

ModelOutput = dict[str, Tensor]
LossResult = tuple[list[Sum], dict[str, Metric]]


def _as_sum(aggregated: Tensor, mask: Tensor, unit: Unit) -> Sum:
    """Undo the division of a loss that was aggregated over this micro-batch alone."""
    count = count_units(mask)[UNITS.index(unit)].clamp(min=1)
    return Sum(aggregated * count.to(aggregated.dtype), unit)


def ppo_loss(
    config: "ActorConfig", model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute policy loss, entropy bonus and KL penalty of a micro-batch.

    A batch without ``old_log_probs`` belongs to a single on-policy update: the current log-probabilities, detached,
    stand for the old ones, and what the skipped pass would have told is measured here.

    Source: PPO (arXiv:1707.06347) section 3; KL in the loss: DeepSeekMath (arXiv:2402.03300) section 4.1.
    """
    batch = data.batch
    mask, log_probs = batch["response_mask"], model_output["log_probs"]
    old_log_probs = batch.get("old_log_probs", None)
    on_policy = old_log_probs is None
    loss_mode = config.policy_loss.loss_mode
    pg_loss, clip_fraction, ppo_kl, clip_fraction_lower = get_policy_loss_fn(loss_mode)(
        old_log_prob=log_probs.detach() if on_policy else old_log_probs,
        log_prob=log_probs,
        advantages=batch["advantages"],
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.get("rollout_is_weights", None),
    )
    policy = _as_sum(pg_loss, mask, agg_unit(effective_loss_agg_mode(loss_mode, config.loss_agg_mode)))
    terms = [policy]
    metrics: dict[str, Metric] = {
        "actor/pg_loss": policy,
        "actor/pg_clipfrac": _as_sum(clip_fraction, mask, "token"),
        "actor/ppo_kl": _as_sum(ppo_kl, mask, "token"),
        "actor/pg_clipfrac_lower": _as_sum(clip_fraction_lower, mask, "token"),
    }
    if "entropy" in model_output:
        entropy = agg_sum(model_output["entropy"], mask, config.loss_agg_mode)
        if config.entropy_coeff:
            terms.append(Sum(-config.entropy_coeff * entropy.total, entropy.unit))
        if on_policy:
            metrics["actor/entropy"] = entropy
    if config.use_kl_loss:
        penalty = kl_penalty(log_probs, batch["ref_log_prob"], config.kl_loss_type)
        kl = agg_sum(penalty, mask, config.loss_agg_mode)
        terms.append(Sum(config.kl_loss_coef * kl.total, kl.unit))
        metrics["actor/kl_loss"] = kl
    if on_policy and "rollout_log_probs" in batch.keys():
        metrics |= mismatch_metrics(log_probs.detach(), batch["rollout_log_probs"], mask)
    return terms, metrics


def value_loss(
    config: "CriticConfig", model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute the clipped value loss of a micro-batch.

    Source: PPO (arXiv:1707.06347) section 5, with the value clipping of its reference implementation.
    """
    batch, mask = data.batch, data.batch["response_mask"]
    loss, clip_fraction = compute_value_loss(
        vpreds=model_output["values"],
        returns=batch["returns"],
        values=batch["values"],
        response_mask=mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
    )
    term = _as_sum(loss, mask, agg_unit(config.loss_agg_mode))
    predicted = torch.where(mask.bool(), model_output["values"].detach(), 0.0).sum()
    return [term], {
        "critic/vf_loss": term,
        "critic/vf_clipfrac": _as_sum(clip_fraction, mask, "token"),
        "critic/vpred_mean": Sum(predicted, "token"),
    }


def sft_loss(
    config: object, model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute the negative log-likelihood, averaged over the trained tokens of the global batch."""
    mask = data.batch["response_mask"]
    term = agg_sum(-model_output["log_probs"], mask, "token-mean")
    return [term], {"loss": term}
