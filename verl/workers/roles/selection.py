"""The tokens that a policy loss treats differently, chosen over the whole mini-batch before its update."""

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algos.policy_loss import LossInputs, Whole, get_token_selector, token_keys
from verl.utils.device import get_device_name
from verl.workers.engine.micro_batch import tensors_of
from verl.workers.engine.pass_spec import PassSpec
from verl.workers.roles.batching import BatchInfo
from verl.workers.roles.losses import SELECTION

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig
    from verl.workers.engine import BaseEngine


class Shards(Whole):
    """The shards of the data-parallel ranks."""

    def __init__(self, group: "ProcessGroup") -> None:
        self.group = group

    def sum(self, values: Tensor) -> Tensor:
        """Add up (n,) values over the ranks, in their order: the result is the same on all."""
        return self._rows(values).sum(0)

    def gather(self, values: Tensor) -> Tensor:
        """Join the (n,) values of the ranks, equally many each."""
        return self._rows(values).flatten()

    def _rows(self, values: Tensor) -> Tensor:
        sent = values.to(get_device_name())
        rows = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, sent, group=self.group)
        return torch.stack(rows).to(values.device)


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
    """Return a seed for each row, (B,) int64, that says nothing of where the row is.

    It is the seed that the response was sampled with, and without one a hash of its tokens.
    """
    batch = tensors_of(data)
    if "sampling_seed" in batch.keys():
        return batch["sampling_seed"]
    mask = batch["response_mask"]
    places = token_keys(torch.zeros(1, dtype=torch.int64, device=mask.device), mask.shape[1])
    return ((batch["responses"].to(torch.int64) + 1) * places * mask).sum(-1)
