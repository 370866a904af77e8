"""The critic without a worker: value updates of a module and an optimizer that the caller has built."""

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import BaseEngine, FSDPEngineWithValueHead
from verl.workers.roles.base import effective_engine_config, list_metrics
from verl.workers.roles.batching import Cut, given_cut, with_meta
from verl.workers.roles.losses import value_loss

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import FSDPCriticConfig


class BasePPOCritic(ABC):
    """What every critic does, whatever its backend."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_values(self, data: DataProto) -> Tensor:
        """Return the values of the response tokens (B, R)."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict[str, list[float]]:
        """Run the optimizer steps of one update; returns each metric of each step."""


class EngineCritic(BasePPOCritic):
    """Values and their updates on one rank, through the engine that the workers use."""

    engine: BaseEngine

    def compute_values(self, data: DataProto) -> Tensor:
        """Return the values (B, R), zero outside the response mask.

        ``meta_info`` holds ``use_dynamic_bsz``, and ``max_token_len`` or ``micro_batch_size``.

        Raises: ValueError naming what ``meta_info`` lacks.
        """
        with self.engine.eval_mode():
            return self.engine.infer_batch(with_meta(data, **given_cut(data).as_meta()))["values"]

    def update_critic(self, data: DataProto) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Raises: ValueError when the rows do not divide into mini-batches.
        """
        config = self.config
        loss_fn = partial(value_loss, config)
        mini_batches = with_meta(data, **Cut.for_training(config).as_meta()).make_iterator(
            config.ppo_mini_batch_size,
            config.ppo_epochs,
            seed=config.data_loader_seed or 0,
            dataloader_kwargs={"shuffle": config.shuffle},
        )
        with self.engine.train_mode():
            steps = [self.engine.train_batch(each, loss_fn) for each in mini_batches]
        return list_metrics(steps, prefix="critic/")


class DataParallelPPOCritic(EngineCritic):
    """A critic on FSDP.

    Args: ``config`` is a critic node, whose batch sizes count rows of this rank; ``critic_module`` a token
    classification model of transformers with one label, sharded by ``fully_shard`` where there are several ranks.
    """

    def __init__(
        self,
        config: "FSDPCriticConfig | DictConfig",
        critic_module: nn.Module,
        critic_optimizer: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.critic_module, self.critic_optimizer = critic_module, critic_optimizer
        self.engine = FSDPEngineWithValueHead.from_module(
            critic_module,
            critic_optimizer,
            remove_padding=self.config.model.use_remove_padding,
            engine_config=effective_engine_config(self.config.model.fsdp_config, self.config),
            optimizer_config=self.config.optimizer(),
        )
