"""The update of a policy by pairs of responses: its loss, and an actor around a module of the caller."""

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
"""The batch key that says which response of a pair is the better one, (B,)."""
_PAIRS = [f"pair_{field.name}" for field in dataclasses.fields(algos.Pairs)]


def add_pairs(config: SPINActorConfig, engine: BaseEngine, data: DataProto, epoch: int, spec: PassSpec) -> None:
    """Compare the responses of a mini-batch, whose neighbours are pairs, under the present weights.

    It needs their log-probabilities: ``old_log_probs`` if the weights have not changed since, else those of one more
    forward pass. So the loss does not depend on how the mini-batch is cut into passes.
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
    """Compute the loss of a micro-batch of responses whose pairs ``add_pairs`` has compared.

    Each response has half of the loss of its pair, and its derivative as gradient. A sum over responses is divided by
    their number, which is twice the number of pairs.
    """
    batch = tensors_of(data)
    pairs = algos.Pairs(*(batch[key] for key in _PAIRS))
    log_probs = algos.summed(model_output["log_probs"], batch["response_mask"])
    chosen = batch[CHOSEN].to(log_probs.dtype)
    with_gradient = pairs.gradient * (log_probs - log_probs.detach())  # zero, but for its gradient
    held = log_probs.detach()
    return [Sum((pairs.loss + 2 * with_gradient).sum(), "sequence")], {
        "actor/dpo_loss": Sum(pairs.loss.sum(), "sequence"),
        "actor/dpo_logits": Sum(pairs.logits.sum(), "sequence"),
        "actor/chosen_logps": Sum(2 * (chosen * held).sum(), "sequence"),
        "actor/rejected_logps": Sum(2 * ((1 - chosen) * held).sum(), "sequence"),
    }


class SPINDataParallelPPOActor(DataParallelPPOActor):
    """An actor around a module of the caller, whose configuration is a ``SPINActorConfig``."""

    config: SPINActorConfig

    def update_policy_dpo_with_ref(self, data: DataProto) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Args: ``data`` holds pairs as neighbours, ``is_chosen`` (B,) and ``ref_log_prob`` (B, R).
        """
        config = self.config
        spec = dataclasses.replace(training_spec(config), temperature=temperature_of(data))
        steps: list[dict[str, float]] = []
        with self.engine.train_mode(), torch.enable_grad():
            for each in mini_batches_of(data, config, config.ppo_mini_batch_size):
                add_pairs(config, self.engine, each, 0, spec)
                steps.append(self.engine.train_batch(each, preference_loss, spec))
        return list_metrics(steps, prefix="actor/")
