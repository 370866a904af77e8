"""The training loop of SPPO, in which the advantage is the reward minus the soft mean of the batch."""

import math
from typing import Any

import torch
from torch import Tensor

from verl.base_config import build_node
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing
from verl.trainer.ppo.segments import without_segments

from .config import SPPOAlgoConfig
from .dp_actor import SEQ_REWARDS, at_each_token


class RaySPPOTrainer(RayPPOTrainer):
    """Self-play preference optimization: PPO with other advantages, and with another loss in the worker.

    Source: SPPO (arXiv:2405.00675), algorithm 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beta = build_node(self.config.algorithm, SPPOAlgoConfig).sppo_eta

    def split_segments(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Keep only the last segment of each trajectory."""
        return without_segments(batch, "SPPO's loss is computed over whole responses")

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Add ``seq_level_rewards`` (B,), and as advantages the same values at each token."""
        return compute_advantage(batch, self.beta)


def softmean(x: Tensor, beta: float) -> Tensor:
    """Return the soft mean of (n,) values: log(mean(exp(beta * x))) / beta.

    It grows with beta from the mean of the values (beta near 0) towards their maximum.
    """
    return (torch.logsumexp(beta * x, dim=0) - math.log(len(x))) / beta


def compute_advantage(data: DataProto, beta: float = 1.0) -> DataProto:
    """Subtract the soft mean of the batch from the reward of each response; rows without tokens do not count."""
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    rewards = torch.where(mask.bool(), tensors["token_level_rewards"], 0.0).sum(-1)
    used = mask.any(-1)
    baseline = softmean(rewards[used], beta) if used.any() else 0.0
    tensors[SEQ_REWARDS] = torch.where(used, rewards - baseline, 0.0)
    tensors["advantages"] = at_each_token(tensors[SEQ_REWARDS], mask)
    tensors["returns"] = tensors["advantages"]
    return data
