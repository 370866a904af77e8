"""Actors, critics and reward models without a worker, around modules that the caller has built.

They share the engines, losses and batching of the workers. With FSDP the module is a transformers model, with
Megatron-Core the chunks of this rank.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from verl.algos.mismatch import finish_gap_metrics
from verl.base_config import build_node, omega_conf_to_dataclass
from verl.models.transformers.dense_common import has_fused_head, install_fused_head
from verl.protocol import DataProto, tensors_of
from verl.utils.torch_functional import at_last_sampled
from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig, McoreEngineConfig, RewardModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.fsdp.forward import Forward
from verl.workers.engine.passes import PassSpec, temperature_of
from verl.workers.rewards.chat_rendering import ChatRenderer
from verl.workers.rewards.scoring import sampled_mask
from verl.workers.roles.base import engine_config_of, list_metrics
from verl.workers.roles.batching import mini_batches_of, policy_update_spec, rows_of_step, training_spec
from verl.workers.roles.losses import ppo_loss, select_tokens, value_loss
from verl.workers.roles.reward_model import last_values

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.transformer.module import MegatronModule
    from omegaconf import DictConfig
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, McoreActorConfig, McoreCriticConfig

ActorConfigT = TypeVar("ActorConfigT", bound=ActorConfig)
CriticConfigT = TypeVar("CriticConfigT", bound=CriticConfig)

# Actors


class BasePPOActor(Generic[ActorConfigT]):
    """The base of every actor around a module, which runs in the engine that the workers use.

    An actor without such an engine overrides ``compute_log_prob`` and ``update_policy``.
    """

    engine: BaseEngine

    def __init__(self, config: ActorConfigT) -> None:
        self.config = config

    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and, on request, entropies (B, R), zero outside the response mask.

        ``meta_info`` holds ``temperature``, ``use_dynamic_bsz``, and ``max_token_len`` or ``micro_batch_size``.

        Raises: ValueError naming what ``meta_info`` lacks.
        """
        spec = dataclasses.replace(PassSpec.from_caller(data), entropy="value" if calculate_entropy else "none")
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data, spec)
        return output["log_probs"], output.get("entropy")

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Args: ``data`` is the batch, or its mini-batches as ``make_minibatch_iterator`` returns them.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        config = self.config
        steps: list[dict[str, float]] = []
        loss_fn = partial(ppo_loss, config)
        per_pass = len(data) // self._rows_of_step(data) if isinstance(data, DataProto) else 1
        mini_batches = self.make_minibatch_iterator(data) if isinstance(data, DataProto) else data
        with self.engine.train_mode():
            for at, each in enumerate(mini_batches):
                spec = policy_update_spec(training_spec(config), config, each, temperature_of(each))
                select_tokens(config, self.engine, each, at // per_pass, spec)
                steps.append(finish_gap_metrics(self.engine.train_batch(each, loss_fn, spec)))
        return list_metrics(steps, prefix="actor/")

    def make_minibatch_iterator(self, data: DataProto) -> Iterator[DataProto]:
        """Return the mini-batches of all epochs.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        temperature_of(data)
        return mini_batches_of(data, self.config, self._rows_of_step(data))

    def _rows_of_step(self, data: DataProto) -> int:
        return rows_of_step(data, self.config.ppo_mini_batch_size, self.engine.get_data_parallel_size())


class DataParallelPPOActor(BasePPOActor["FSDPActorConfig"]):
    """An actor on FSDP.

    Args:
        config: an actor node, whose batch sizes count rows of this rank.
        actor_module: a causal model of transformers; with several ranks, sharded by ``fully_shard``.
        actor_optimizer: None for an actor that only infers.
    """

    def __init__(
        self,
        config: "FSDPActorConfig | DictConfig",
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        if self.config.use_fused_kernels and not has_fused_head(actor_module):
            install_fused_head(actor_module)  # type: ignore[arg-type]
        packed = self.config.use_remove_padding
        self.run_in(_engine_of_module(FSDPEngineWithLMHead, actor_module, actor_optimizer, self.config, packed))

    @classmethod
    def around(cls, engine: FSDPEngine, config: "FSDPActorConfig") -> Self:
        """Return an actor whose passes run in an engine that exists, in which the batch sizes count rows."""
        actor = cls.__new__(cls)
        BasePPOActor.__init__(actor, config)
        actor.actor_module = engine.module
        actor.actor_optimizer = engine.optimizer
        actor.run_in(engine)
        return actor

    def run_in(self, engine: FSDPEngine) -> None:
        """Let an engine of this module run ``_forward_micro_batch`` and ``_optimizer_step`` of this actor."""
        given = {each.name: getattr(engine.forward, each.name) for each in dataclasses.fields(Forward)}
        engine.forward = self._forward = _ActorForward(**given, actor=self)
        engine.step_hook = self._optimizer_step
        self.engine = engine

    def _forward_micro_batch(
        self, micro_batch: Mapping[str, Any], temperature: float, calculate_entropy: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Return the entropies, if asked for, and the log-probabilities (b, R) of a micro-batch on the device.

        Both are zero outside the response mask. ``micro_batch`` holds its tensors and non-tensors by name.
        """
        entropy = self._forward.spec.entropy if calculate_entropy else "none"
        if calculate_entropy and entropy == "none":
            entropy = "grad"
        spec = dataclasses.replace(self._forward.spec, temperature=temperature, entropy=entropy)
        output = self._forward.run(DataProto.from_single_dict(micro_batch), spec)
        return output.get("entropy"), output["log_probs"]

    def _optimizer_step(self) -> float | Tensor:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""
        return self.engine.optimizer_step()


@dataclasses.dataclass(eq=False)
class _ActorForward(Forward):
    """Runs each micro-batch by a method of the actor that a subclass may override; ``spec`` is that of the pass."""

    actor: DataParallelPPOActor | None = None
    spec: PassSpec = PassSpec()

    def __call__(self, rows: DataProto, spec: PassSpec) -> dict[str, Tensor]:
        if spec.full_kl:  # the method has no place for the divergence from a reference
            return self.run(rows, spec)
        assert self.actor is not None
        self.spec = spec
        entropy, log_probs = self.actor._forward_micro_batch(
            {**tensors_of(rows), **rows.non_tensor_batch},
            temperature=spec.temperature,
            calculate_entropy=spec.entropy != "none",
        )
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    def run(self, rows: DataProto, spec: PassSpec) -> dict[str, Tensor]:
        """Run the model on the rows; see ``Forward``."""
        return super().__call__(rows, spec)


class MegatronPPOActor(BasePPOActor["McoreActorConfig"]):
    """An actor on Megatron-Core.

    Args:
        config: an actor node, whose batch sizes count rows of this data-parallel rank.
        model_config: not read; part of the established signature, like ``tf_config``.
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


# Critics


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
        self.engine = _engine_of_module(FSDPEngineWithValueHead, critic_module, critic_optimizer, self.config, packed)


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


# Reward models


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


def _engine_of_module(
    cls: type[FSDPEngine],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: "FSDPActorConfig | FSDPCriticConfig",
    remove_padding: bool,
) -> FSDPEngine:
    """Return an FSDP engine around the module."""
    engine = engine_config_of(config)
    assert isinstance(engine, FSDPEngineConfig)
    return cls.from_module(
        module, optimizer, remove_padding=remove_padding, engine_config=engine, optimizer_config=config.optimizer()
    )


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
