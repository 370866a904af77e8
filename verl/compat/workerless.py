"""Actors on Megatron-Core, critics and reward models without a worker, around modules that the caller has built.

They share the engines, losses and batching of the workers. With FSDP the module is a transformers model, with
Megatron-Core the chunks of this rank. ``DataParallelPPOActor`` is in ``verl.workers.roles.own_actor``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from verl.base_config import build_node, omega_conf_to_dataclass
from verl.protocol import DataProto, tensors_of
from verl.utils.torch_functional import at_last_sampled
from verl.workers.config import CriticConfig, McoreEngineConfig, RewardModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithValueHead
from verl.workers.engine.passes import PassSpec
from verl.workers.rewards.chat_rendering import ChatRenderer
from verl.workers.rewards.scoring import sampled_mask
from verl.workers.roles.base import engine_config_of, list_metrics
from verl.workers.roles.batching import mini_batches_of, rows_of_step, training_spec
from verl.workers.roles.losses import value_loss
from verl.workers.roles.own_actor import BasePPOActor, engine_of_module
from verl.workers.roles.reward_model import last_values

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.transformer.module import MegatronModule
    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from verl.workers.config import FSDPCriticConfig, McoreActorConfig, McoreCriticConfig

CriticConfigT = TypeVar("CriticConfigT", bound=CriticConfig)


class MegatronPPOActor(BasePPOActor["McoreActorConfig"]):
    """An actor on Megatron-Core.

    Args:
        config: an actor node, whose batch sizes count rows of this data-parallel rank.
        model_config: not read; part of the signature of the established verl interface, like ``tf_config``.
        actor_module: the chunks of this rank, in Megatron-Core's ``DistributedDataParallel`` if they train.
        actor_optimizer: an optimizer of Megatron-Core; None for an actor that only infers.
    """

    def __init__(
        self,
        config: "McoreActorConfig | DictConfig",
        model_config: Any,
        hf_config: "PretrainedConfig",
        tf_config: Any,
        actor_module: "Sequence[MegatronModule]",
        actor_optimizer: "ChainedOptimizer | None" = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        fuses_head = self.config.use_fused_kernels
        self.engine = _engine_of_modules(
            "language_model", actor_module, actor_optimizer, hf_config, self.config, fuses_head
        )


class BasePPOCritic(Generic[CriticConfigT]):
    """The base of every critic around a module, which runs in the engine that the workers use.

    A critic without such an engine overrides ``compute_values`` and ``update_critic``.
    """

    engine: BaseEngine

    def __init__(self, config: CriticConfigT) -> None:
        self.config = config

    def compute_values(self, data: DataProto) -> Tensor:
        """Return the values (B, R), zero outside the response mask.

        ``meta_info`` holds ``use_dynamic_bsz``, and ``max_token_len`` or ``micro_batch_size``.

        Raises: ValueError naming what ``meta_info`` lacks.
        """
        with self.engine.eval_mode():
            return self.engine.infer_batch(data, PassSpec.from_caller(data, needs_temperature=False))["values"]

    def update_critic(self, data: DataProto) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Raises: ValueError when the rows do not divide into mini-batches.
        """
        config = self.config
        loss_fn = partial(value_loss, config)
        rows = rows_of_step(data, config.ppo_mini_batch_size, self.engine.get_data_parallel_size())
        mini_batches = mini_batches_of(data, config, rows)
        with self.engine.train_mode():
            steps = [self.engine.train_batch(each, loss_fn, training_spec(config)) for each in mini_batches]
        return list_metrics(steps, prefix="critic/")


class DataParallelPPOCritic(BasePPOCritic["FSDPCriticConfig"]):
    """A critic on FSDP.

    Args:
        config: a critic node, whose batch sizes count rows of this rank.
        critic_module: a token classification model of transformers with one label; with several ranks, sharded by
            ``fully_shard``.
    """

    def __init__(
        self,
        config: "FSDPCriticConfig | DictConfig",
        critic_module: nn.Module,
        critic_optimizer: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.critic_module = critic_module
        self.critic_optimizer = critic_optimizer
        packed = self.config.model.use_remove_padding
        self.engine = engine_of_module(FSDPEngineWithValueHead, critic_module, critic_optimizer, self.config, packed)


class MegatronPPOCritic(BasePPOCritic["McoreCriticConfig"]):
    """A critic on Megatron-Core; arguments as for ``MegatronPPOActor``, the head of the last chunk a ``ValueHead``."""

    def __init__(
        self,
        config: "McoreCriticConfig | DictConfig",
        model_config: Any,
        hf_config: "PretrainedConfig",
        tf_config: Any,
        critic_module: "Sequence[MegatronModule]",
        critic_optimizer: "ChainedOptimizer | None" = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.critic_module = critic_module
        self.critic_optimizer = critic_optimizer
        self.engine = _engine_of_modules("value_model", critic_module, critic_optimizer, hf_config, self.config)


class BasePPORewardModel(ABC):
    """The interface of every reward model around a module."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config

    @abstractmethod
    def compute_reward(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` (B, R): the score of each response at its last sampled token, zero elsewhere."""


class MegatronRewardModel(BasePPORewardModel):
    """A reward model on Megatron-Core.

    Args:
        config: a ``reward_model`` node.
        sft_tokenizer: the policy's tokenizer, needed with ``rm_tokenizer``.
        rm_tokenizer: render chats again in its template; batches then hold ``raw_prompt``.

    Raises: ValueError for ``rm_tokenizer`` without ``sft_tokenizer``.
    """

    def __init__(
        self,
        config: "RewardModelConfig | DictConfig",
        model_config: Any,
        reward_model_module: "Sequence[MegatronModule]",
        hf_config: "PretrainedConfig",
        tf_config: Any,
        sft_tokenizer: "PreTrainedTokenizerBase | None" = None,
        rm_tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        super().__init__(build_node(config, RewardModelConfig))
        self.reward_model_module = reward_model_module
        self.engine = _engine_of_modules("reward_model", reward_model_module, None, hf_config, self.config)
        self.switch: ChatRenderer | None = None
        if rm_tokenizer is not None:
            if sft_tokenizer is None:
                raise ValueError("rm_tokenizer needs sft_tokenizer, which decodes the responses: pass the policy's")
            eos = {sft_tokenizer.eos_token_id}
            self.switch = ChatRenderer(sft_tokenizer, rm_tokenizer, self.config.max_length, self.config.truncation, eos)

    def compute_reward(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` (B, R): the score of each response at its last sampled token, zero elsewhere."""
        batch = tensors_of(data)
        config = self.config
        spec = PassSpec(config.use_dynamic_bsz, config.micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu)
        if self.switch is None:
            rows = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        else:
            rows = self.switch(data)[0]
        scores = last_values(self.engine, rows, spec)
        placed = at_last_sampled(scores.float(), sampled_mask(data))
        return DataProto.from_dict(tensors={"rm_scores": placed})


def _engine_of_modules(
    kind: str,
    modules: "Sequence[MegatronModule]",
    optimizer: "ChainedOptimizer | None",
    hf_config: "PretrainedConfig",
    config: "McoreActorConfig | McoreCriticConfig | RewardModelConfig",
    fuses_head: bool = False,
) -> BaseEngine:
    """Return the registered engine around the chunks. Only this imports Megatron-Core, which takes seconds."""
    cls = EngineRegistry.get_engine_cls(kind, "megatron")
    from verl.workers.engine.megatron import MegatronEngine

    engine_config = engine_config_of(config)
    assert issubclass(cls, MegatronEngine) and isinstance(engine_config, McoreEngineConfig)
    optimizer_config = None if isinstance(config, RewardModelConfig) else config.optimizer()
    return cls.from_modules(modules, optimizer, hf_config, engine_config, optimizer_config, fuses_head)
