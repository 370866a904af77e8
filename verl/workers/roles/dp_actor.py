"""The actor without a worker: PPO updates of a module and an optimizer that the caller has built."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.models.transformers.dense_common import has_fused_head, install_fused_head
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import BaseEngine, FSDPEngineWithLMHead
from verl.workers.roles.base import effective_engine_config, list_metrics
from verl.workers.roles.batching import Cut, given_cut, policy_update_meta, temperature_of, with_meta
from verl.workers.roles.losses import ppo_loss
from verl.workers.roles.mismatch import finish_mismatch
from verl.workers.roles.selection import select_tokens

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import FSDPActorConfig


class BasePPOActor(ABC):
    """What every actor does, whatever its backend."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and, where asked for, entropies of the response tokens (B, R)."""

    @abstractmethod
    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Run the optimizer steps of one PPO update; returns each metric of each step."""


class EngineActor(BasePPOActor):
    """Log-probabilities and PPO updates of one rank, through the engine that the workers use."""

    engine: BaseEngine

    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and, where asked for, entropies (B, R), zero outside the response mask.

        ``meta_info`` holds ``temperature``, ``use_dynamic_bsz``, and ``max_token_len`` or ``micro_batch_size``.

        Raises: ValueError naming what ``meta_info`` lacks.
        """
        meta = given_cut(data).as_meta()
        rows = with_meta(data, temperature=temperature_of(data), calculate_entropy=calculate_entropy, **meta)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(rows)
        return output["log_probs"], output.get("entropy")

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Instead of the batch it takes mini-batches, as ``make_minibatch_iterator`` gives them.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        config, steps = self.config, []
        loss_fn = partial(ppo_loss, config)
        per_pass = len(data) // config.ppo_mini_batch_size if isinstance(data, DataProto) else 1
        mini_batches = self.make_minibatch_iterator(data) if isinstance(data, DataProto) else data
        with self.engine.train_mode():
            for at, each in enumerate(mini_batches):
                select_tokens(config, self.engine, each, draw=at // per_pass)
                steps.append(finish_mismatch(self.engine.train_batch(each, loss_fn)))
        return list_metrics(steps, prefix="actor/")

    def make_minibatch_iterator(self, data: DataProto) -> Iterator[DataProto]:
        """Return the mini-batches of all epochs.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        config = self.config
        rows = with_meta(data, **policy_update_meta(config, data, Cut.for_training(config), temperature_of(data)))
        return rows.make_iterator(
            config.ppo_mini_batch_size,
            config.ppo_epochs,
            seed=config.data_loader_seed or 0,
            dataloader_kwargs={"shuffle": config.shuffle},
        )


class DataParallelPPOActor(EngineActor):
    """An actor on FSDP.

    Args: ``config`` is an actor node, whose batch sizes count rows of this rank; ``actor_module`` a causal model of
    transformers, sharded by ``fully_shard`` where there are several ranks; without ``actor_optimizer`` it only infers.
    """

    def __init__(
        self,
        config: "FSDPActorConfig | DictConfig",
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.actor_module, self.actor_optimizer = actor_module, actor_optimizer
        if self.config.use_fused_kernels and not has_fused_head(actor_module):
            install_fused_head(actor_module)  # type: ignore[arg-type]
        self.engine = FSDPEngineWithLMHead.from_module(
            actor_module,
            actor_optimizer,
            remove_padding=self.config.use_remove_padding,
            engine_config=effective_engine_config(self.config.fsdp_config, self.config),
            optimizer_config=self.config.optimizer(),
        )
