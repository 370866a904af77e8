"""The losses that the roles hand to an engine, as sums over a micro-batch, and the tokens that a loss selects."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algos.aggregate import (
    SHARE_COLUMN,
    Extreme,
    Metric,
    Sum,
    agg_sum,
    agg_unit,
    by_length,
    rows_by_share,
    sum_of_mean,
)
from verl.algos.kl import kl_penalty
from verl.algos.mismatch import gap_sum_metrics
from verl.algos.policy_loss import LossInputs, Whole, get_token_selector, policy_loss_sums, token_keys
from verl.algos.value_loss import compute_value_loss
from verl.protocol import tensors_of
from verl.workers.engine.passes import PassSpec, gather_rows
from verl.workers.roles.batching import BatchInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.engine import BaseEngine

ModelOutput = dict[str, Tensor]
LossResult = tuple[list[Sum], dict[str, Metric]]

SELECTION = "policy_loss_selection"
"""The batch key of the tokens (B, R) that a policy loss with a selector treats differently."""


def _selection(loss_mode: str, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the selection for a loss that has a selector, None for other losses.

    Raises: ValueError if the caller has not selected tokens over the mini-batch of this micro-batch.
    """
    if get_token_selector(loss_mode) is None:
        return None
    if SELECTION not in batch.keys():
        raise ValueError(
            f"policy loss {loss_mode!r} selects tokens over the whole mini-batch: call "
            f"verl.workers.roles.losses.select_tokens before the update, which adds {SELECTION!r}"
        )
    return batch[SELECTION]


def as_engine_loss(loss_fn: Callable[..., LossResult]) -> Callable[[ModelOutput, "DataProto"], LossResult]:
    """Return a loss of the caller, bound to its configuration, as an engine calls it.

    Raises: TypeError, when called, if the loss returns anything but sums: an engine cannot normalise a scalar over the
    other micro-batches and ranks.
    """

    def call(model_output: ModelOutput, data: "DataProto") -> LossResult:
        terms, metrics = loss_fn(model_output=model_output, data=data)
        if not isinstance(terms, list) or not all(isinstance(term, Sum) for term in terms):
            raise TypeError(
                f"the loss returned {type(terms).__name__}: return a list of verl.algos.aggregate.Sum(total, unit), "
                "each the sum over the micro-batch and the unit that divides it, and a dict of metrics in the same form"
            )
        return terms, metrics

    return call


def _kl_to_reference(kl_loss_type: str, model_output: ModelOutput, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the divergence from the reference at each token: estimated from the sampled tokens, or exact for ``full``.

    Raises: ValueError if the engine has not computed the exact divergence.
    """
    if kl_loss_type != "full":
        # Zero outside the mask, as ``log_probs`` are, so that the difference is zero there.
        reference = torch.where(batch["response_mask"].bool(), batch["ref_log_prob"], 0.0)
        return kl_penalty(model_output["log_probs"], reference, kl_loss_type)
    if "full_kl" not in model_output:
        raise ValueError("kl_loss_type='full' needs the reference's distribution in the actor's engine: set_reference")
    return model_output["full_kl"]


def ppo_loss(
    config: "ActorConfig", model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute policy loss, entropy bonus and KL penalty of a micro-batch.

    A batch without ``old_log_probs`` belongs to a single on-policy update. The detached current log-probabilities then
    serve as the old ones. Then, and where those of the rollout are the old ones, this function measures the metrics of
    the pass that was skipped.

    Source: PPO (arXiv:1707.06347) section 3; KL in the loss: DeepSeekMath (arXiv:2402.03300) section 4.1.
    """
    batch = tensors_of(data)
    mask = batch["response_mask"]
    log_probs = model_output["log_probs"]
    old_log_probs = batch.get("old_log_probs", None)
    is_first = config.use_rollout_log_probs or old_log_probs is None
    loss_mode = config.policy_loss.loss_mode
    length = config.loss_scale_factor
    shares = batch.get(SHARE_COLUMN, None)
    inputs = LossInputs(
        old_log_prob=log_probs.detach() if old_log_probs is None else old_log_probs,
        log_prob=log_probs,
        advantages=batch["advantages"],
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.get("rollout_is_weights", None),
        selection=_selection(loss_mode, batch),
    )
    policy = policy_loss_sums(loss_mode, inputs, length, shares)
    terms = [policy.loss]
    metrics: dict[str, Metric] = {
        "actor/pg_loss": policy.loss,
        "actor/pg_clipfrac": Sum(policy.clipped, "token"),
        "actor/ppo_kl": Sum(policy.kl, "token"),
        "actor/pg_clipfrac_lower": Sum(policy.clipped_low, "token"),
    }
    if "entropy" in model_output:
        entropy = agg_sum(model_output["entropy"], mask, config.loss_agg_mode, length, shares)
        if config.entropy_coeff:
            terms.append(Sum(-config.entropy_coeff * entropy.total, entropy.unit))
        if is_first:
            metrics["actor/entropy"] = entropy
    if config.use_kl_loss:
        divergence = _kl_to_reference(config.kl_loss_type, model_output, batch)
        kl = agg_sum(divergence, mask, config.loss_agg_mode, length, shares)
        terms.append(Sum(config.kl_loss_coef * kl.total, kl.unit))
        metrics["actor/kl_loss"] = kl
        coefficient = torch.tensor(config.kl_loss_coef, dtype=torch.float64, device=log_probs.device)
        metrics["actor/kl_coef"] = Extreme(coefficient, "max")
    if is_first and "rollout_log_probs" in batch.keys():
        metrics |= gap_sum_metrics(log_probs.detach(), batch["rollout_log_probs"], mask)
    return terms, metrics


def value_loss(
    config: "CriticConfig", model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute the clipped value loss of a micro-batch.

    Source: PPO (arXiv:1707.06347) section 5, with the value clipping of its reference implementation.
    """
    batch = tensors_of(data)
    mask = batch["response_mask"]
    values = model_output["values"]
    mode = config.loss_agg_mode

    def means(*columns: Tensor) -> tuple[Tensor, Tensor]:
        predictions, returns, old, kept = columns
        return compute_value_loss(predictions, returns, old, kept, config.cliprange_value, mode)

    columns = (values, batch["returns"], batch["values"], mask)
    mean, clip_fraction = means(*columns)
    loss = sum_of_mean(mean, mask, agg_unit(mode))
    if parts := rows_by_share(batch.get(SHARE_COLUMN, None), mode):
        totals = [
            share * sum_of_mean(means(*(column[rows] for column in columns))[0], mask[rows], loss.unit).total
            for share, rows in parts
        ]
        loss = Sum(torch.stack(totals).sum(), loss.unit)
    loss = by_length(loss, mode, mask.shape[-1], config.loss_scale_factor)
    predicted = torch.where(mask.bool(), values.detach(), 0.0).sum()
    return [loss], {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": sum_of_mean(clip_fraction, mask, "token"),
        "critic/vpred_mean": Sum(predicted, "token"),
    }


def sft_loss(
    config: object, model_output: ModelOutput, data: "DataProto", dp_group: "ProcessGroup | None" = None
) -> LossResult:
    """Compute the negative log-likelihood, averaged over the trained tokens of the global batch."""
    mask = tensors_of(data)["response_mask"]
    term = agg_sum(-model_output["log_probs"], mask, "token-mean")
    return [term], {"loss": term}


# Tokens that a policy loss treats differently, selected over the whole mini-batch before its update


class Shards(Whole):
    """The shards of the data-parallel ranks."""

    def __init__(self, group: "ProcessGroup") -> None:
        self.group = group

    def sum(self, values: Tensor) -> Tensor:
        """Add up (n,) values over the ranks, in their order: the result is the same on all."""
        return gather_rows(values, self.group.size(), self.group).sum(0)

    def gather(self, values: Tensor) -> Tensor:
        """Join the (n,) values of the ranks, equally many each."""
        return gather_rows(values, self.group.size(), self.group).flatten()


def select_tokens(
    config: "ActorConfig", engine: "BaseEngine", data: "DataProto", draw: int = 0, spec: PassSpec | None = None
) -> None:
    """Add the selection (B, R) of the configured loss to a mini-batch; do nothing if the loss has no selector.

    Collective over the data-parallel ranks, whose shards make the mini-batch. The result depends neither on the
    shards nor on the order of the rows. It needs the log-probabilities of the present weights: ``old_log_probs`` if
    the weights have not changed since (``BatchInfo.old_log_probs_version``), else those of a forward pass.

    Args:
        draw: tells passes over the same rows apart.
        spec: options of the update, which the forward pass shares; None reads them from ``meta_info``.
    """
    selector = get_token_selector(config.policy_loss.loss_mode)
    if selector is None:
        return
    batch = tensors_of(data)
    mask = batch["response_mask"]
    unchanged = BatchInfo.of(data).old_log_probs_version == engine.weights_version
    if unchanged and "old_log_probs" in batch.keys():
        current = batch["old_log_probs"]
    else:
        asked = dataclasses.replace(
            spec or PassSpec.from_meta(data.meta_info), entropy="none", full_kl=False, after_first_forward=None
        )
        current = engine.infer_batch(data, asked)["log_probs"].to(mask.device)
    group = engine.get_data_parallel_group()
    old = batch.get("old_log_probs", current)
    inputs = LossInputs(old, current, batch["advantages"], mask, config.loss_agg_mode, config)
    keys = token_keys(row_seeds(data), mask.shape[1], draw)
    batch[SELECTION] = selector(inputs, keys, Whole() if group is None else Shards(group))


def row_seeds(data: "DataProto") -> Tensor:
    """Return a seed for each row, (B,) int64, independent of its position.

    This is the seed with which the response was sampled; without such a seed, a hash of its tokens.
    """
    batch = tensors_of(data)
    if "sampling_seed" in batch.keys():
        return batch["sampling_seed"]
    mask = batch["response_mask"]
    places = token_keys(torch.zeros(1, dtype=torch.int64, device=mask.device), mask.shape[1])
    return ((batch["responses"].to(torch.int64) + 1) * places * mask).sum(-1)
