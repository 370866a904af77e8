"""The policy update on pairs of responses: the loss, and an actor for a module that the caller provides."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algos.aggregate import Metric, Sum
from verl.protocol import DataProto, tensors_of
from verl.workers.actor import DataParallelPPOActor
from verl.workers.engine import BaseEngine
from verl.workers.engine.passes import PassSpec, temperature_of
from verl.workers.roles.base import list_metrics
from verl.workers.roles.batching import BatchInfo, mini_batches_of, training_spec

from . import core_algos as algos
from .config import SPINActorConfig

CHOSEN = "is_chosen"
"""The batch key of the flag (B,) that a response is the better one of its pair."""
_PAIRS = [f"pair_{field.name}" for field in dataclasses.fields(algos.Pairs)]


def add_pairs(config: SPINActorConfig, engine: BaseEngine, data: DataProto, epoch: int, spec: PassSpec) -> None:
    """Add to a mini-batch, whose neighbouring rows are pairs, their losses and gradients under the present weights.

    The log-probabilities are ``old_log_probs`` if the weights have not changed since, else the result of one more
    forward pass. Computing the pairs over the whole mini-batch makes the loss independent of the micro-batches.
    """
    batch = tensors_of(data)
    current = batch.get("old_log_probs", None)
    if current is None or BatchInfo.of(data).old_log_probs_version != engine.weights_version:
        asked = dataclasses.replace(spec, entropy="none", after_first_forward=None)
        current = engine.infer_batch(data, asked)["log_probs"]
    mask = batch["response_mask"]
    ratio = algos.summed(current.to(mask.device) - batch["ref_log_prob"], mask)
    pairs = algos.pairs_of(ratio, batch[CHOSEN], config.dpo_beta, config.dpo_label_smoothing, config.dpo_loss_type)
    for key, values in zip(_PAIRS, dataclasses.astuple(pairs), strict=True):
        batch[key] = values


def preference_loss(model_output: Mapping[str, Tensor], data: DataProto) -> tuple[list[Sum], dict[str, Metric]]:
    """Compute the loss of a micro-batch from the columns that ``add_pairs`` has added.

    A response contributes half of its pair's loss, and the gradient is the stored derivative. The engine divides the
    sum by the number of responses, twice the number of pairs; hence the factors 2 below.
    """
    batch = tensors_of(data)
    pairs = algos.Pairs(*(batch[key] for key in _PAIRS))
    log_probs = algos.summed(model_output["log_probs"], batch["response_mask"])
    chosen = batch[CHOSEN].to(log_probs.dtype)
    with_gradient = pairs.gradient * (log_probs - log_probs.detach())  # zero, with the stored gradient
    held = log_probs.detach()
    return [Sum((pairs.loss + 2 * with_gradient).sum(), "sequence")], {
        "actor/dpo_loss": Sum(pairs.loss.sum(), "sequence"),
        "actor/dpo_logits": Sum(pairs.logits.sum(), "sequence"),
        "actor/chosen_logps": Sum(2 * (chosen * held).sum(), "sequence"),
        "actor/rejected_logps": Sum(2 * ((1 - chosen) * held).sum(), "sequence"),
    }


class SPINDataParallelPPOActor(DataParallelPPOActor):
    """The actor of SPIN for a module that the caller provides."""

    config: SPINActorConfig

    def update_policy_dpo_with_ref(self, data: DataProto) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; return each metric of each step.

        Args: ``data`` holds ``is_chosen`` (B,) and ``ref_log_prob`` (B, R); neighbouring rows are pairs.
        """
        config = self.config
        spec = dataclasses.replace(training_spec(config), temperature=temperature_of(data))
        steps: list[dict[str, float]] = []
        with self.engine.train_mode(), torch.enable_grad():
            for each in mini_batches_of(data, config, config.ppo_mini_batch_size):
                add_pairs(config, self.engine, each, 0, spec)
                steps.append(self.engine.train_batch(each, preference_loss, spec))
        return list_metrics(steps, prefix="actor/")
