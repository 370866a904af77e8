"""The losses that the roles hand to an engine: sums over a micro-batch, and what divides them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algos.aggregate import Extreme, Metric, Sum, agg_count, agg_sum, agg_unit
from verl.algos.kl import kl_penalty
from verl.algos.policy_loss import effective_loss_agg_mode, get_policy_loss_fn, get_token_selector
from verl.algos.value_loss import compute_value_loss
from verl.workers.roles.mismatch import mismatch_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig, CriticConfig

ModelOutput = dict[str, Tensor]
LossResult = tuple[list[Sum], dict[str, Metric]]

SELECTION = "policy_loss_selection"
"""The batch key of the tokens (B, R) that a policy loss with a selector treats differently."""


def _as_sum(aggregated: Tensor, mask: Tensor, loss_agg_mode: str, length: int | None = None) -> Sum:
    """Undo the division of a loss that ``agg_loss`` aggregated over this micro-batch alone.

    Of ``seq-mean-token-sum-norm`` it divided by the width of the mask: ``length`` takes its place.
    """
    count = agg_count(mask.sum(-1), loss_agg_mode)
    if loss_agg_mode == "seq-mean-token-sum-norm" and length is not None:
        count = count * (mask.shape[-1] / length)
    return Sum(aggregated * count.to(aggregated.dtype), agg_unit(loss_agg_mode))


def _selection(loss_mode: str, batch: "Mapping[str, Tensor]") -> dict[str, Tensor]:
    """Return what a loss with a selector takes besides.

    Raises: ValueError when nothing was selected over the mini-batch, of which this is a part.
    """
    if get_token_selector(loss_mode) is None:
        return {}
    if SELECTION not in batch.keys():
        raise ValueError(
            f"policy loss {loss_mode!r} selects tokens over the whole mini-batch: call "
            f"verl.workers.roles.selection.select_tokens before the update, which adds {SELECTION!r}"
        )
    return {"selection": batch[SELECTION]}


def as_engine_loss(loss_fn: Callable[..., LossResult]) -> Callable[[ModelOutput, "DataProto"], LossResult]:
    """Return a loss of the caller, bound to its configuration, as an engine calls it.

    Raises: TypeError, when it is called, for a loss that returns anything but sums: a scalar could not be normalised
    over the other micro-batches and ranks.
    """

    def call(model_output: ModelOutput, data: "DataProto") -> LossResult:
        terms, metrics = loss_fn(model_output=model_output, data=data)
        if not isinstance(terms, list) or not all(isinstance(term, Sum) for term in terms):
            raise TypeError(
                f"the loss returned {type(terms).__name__}: return [verl.algos.aggregate.Sum(total, unit), ...], the "
                "sum over the micro-batch and what divides it, and metrics likewise"
            )
        return terms, metrics

    return call


def _kl_to_reference(kl_loss_type: str, model_output: ModelOutput, batch: "Mapping[str, Tensor]") -> Tensor:
    """Return the divergence from the reference at each token, by the sampled tokens or, for ``full``, exactly.

    Raises: ValueError when the engine has not computed the exact one.
    """
    if kl_loss_type != "full":
        reference = torch.where(batch["response_mask"].bool(), batch["ref_log_prob"], 0.0)  # as log_probs are there
        return kl_penalty(model_output["log_probs"], reference, kl_loss_type)
    if "full_kl" not in model_output:
        raise ValueError("kl_loss_type='full' needs the reference's distribution in the actor's engine: set_reference")
    return model_output["full_kl"]


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
        **_selection(loss_mode, batch),
    )
    length = config.loss_scale_factor
    policy = _as_sum(pg_loss, mask, effective_loss_agg_mode(loss_mode, config.loss_agg_mode), length)
    terms = [policy]
    metrics: dict[str, Metric] = {
        "actor/pg_loss": policy,
        "actor/pg_clipfrac": _as_sum(clip_fraction, mask, "token-mean"),
        "actor/ppo_kl": _as_sum(ppo_kl, mask, "token-mean"),
        "actor/pg_clipfrac_lower": _as_sum(clip_fraction_lower, mask, "token-mean"),
    }
    if "entropy" in model_output:
        entropy = agg_sum(model_output["entropy"], mask, config.loss_agg_mode, length)
        if config.entropy_coeff:
            terms.append(Sum(-config.entropy_coeff * entropy.total, entropy.unit))
        if on_policy:
            metrics["actor/entropy"] = entropy
    if config.use_kl_loss:
        kl = agg_sum(_kl_to_reference(config.kl_loss_type, model_output, batch), mask, config.loss_agg_mode, length)
        terms.append(Sum(config.kl_loss_coef * kl.total, kl.unit))
        metrics["actor/kl_loss"] = kl
        coefficient = torch.tensor(config.kl_loss_coef, dtype=torch.float64, device=log_probs.device)
        metrics["actor/kl_coef"] = Extreme(coefficient, "max")
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
    term = _as_sum(loss, mask, config.loss_agg_mode, config.loss_scale_factor)
    predicted = torch.where(mask.bool(), model_output["values"].detach(), 0.0).sum()
    return [term], {
        "critic/vf_loss": term,
        "critic/vf_clipfrac": _as_sum(clip_fraction, mask, "token-mean"),
        "critic/vpred_mean": Sum(predicted, "token"),
    }


def sft_loss(
    config: object, model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute the negative log-likelihood, averaged over the trained tokens of the global batch."""
    mask = data.batch["response_mask"]
    term = agg_sum(-model_output["log_probs"], mask, "token-mean")
    return [term], {"loss": term}
