"""Actor, critic and reward model without a worker, around chunks on Megatron-Core that the caller has built."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.reward_model import reward_model_config
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.rewards.chats import ChatSwitch
from verl.workers.roles.batching import Cut
from verl.workers.roles.dp_actor import EngineActor
from verl.workers.roles.dp_critic import EngineCritic
from verl.workers.roles.reward_model import at_last_token, inference_engine_config, last_values

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig

    from verl.workers.config import McoreActorConfig, McoreCriticConfig, RewardModelConfig


class MegatronPPOActor(EngineActor):
    """An actor on Megatron-Core.

    Args: ``config`` is an actor node, whose batch sizes count rows of this data-parallel rank; ``actor_module`` are
    the chunks of this rank, in Megatron-Core's ``DistributedDataParallel`` where ``actor_optimizer``, one of
    Megatron-Core, trains them. ``model_config`` and ``tf_config`` are of the established signature, and not read.
    """

    def __init__(
        self,
        config: "McoreActorConfig | DictConfig",
        model_config: Any,
        hf_config: "PretrainedConfig",
        tf_config: Any,
        actor_module: Sequence[Any],
        actor_optimizer: Any = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.actor_module, self.actor_optimizer = actor_module, actor_optimizer
        fuses_head = self.config.use_fused_kernels
        self.engine = _engine("language_model", actor_module, actor_optimizer, hf_config, self.config, fuses_head)


class MegatronPPOCritic(EngineCritic):
    """A critic on Megatron-Core; arguments as for ``MegatronPPOActor``, the head of the last chunk a ``ValueHead``."""

    def __init__(
        self,
        config: "McoreCriticConfig | DictConfig",
        model_config: Any,
        hf_config: "PretrainedConfig",
        tf_config: Any,
        critic_module: Sequence[Any],
        critic_optimizer: Any = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.critic_module, self.critic_optimizer = critic_module, critic_optimizer
        self.engine = _engine("value_model", critic_module, critic_optimizer, hf_config, self.config)


class BasePPORewardModel(ABC):
    """What every reward model around a module does."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def compute_reward(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` (B, R): the score of each response at its last valid token, zero elsewhere."""


class MegatronRewardModel(BasePPORewardModel):
    """A reward model on Megatron-Core.

    Args: ``config`` is a ``reward_model`` node; with ``rm_tokenizer`` chats are rendered anew in its template, for
    which ``sft_tokenizer`` is the policy's and batches hold ``raw_prompt``.
    """

    def __init__(
        self,
        config: "RewardModelConfig | DictConfig",
        model_config: Any,
        reward_model_module: Sequence[Any],
        hf_config: "PretrainedConfig",
        tf_config: Any,
        sft_tokenizer: Any = None,
        rm_tokenizer: Any = None,
    ) -> None:
        super().__init__(reward_model_config(config))
        self.reward_model_module = reward_model_module
        self.engine = _of_modules(
            "reward_model", reward_model_module, None, hf_config, inference_engine_config(self.config), None
        )
        self.switch: ChatSwitch | None = None
        if rm_tokenizer is not None:
            ends = {sft_tokenizer.eos_token_id}
            self.switch = ChatSwitch(sft_tokenizer, rm_tokenizer, self.config.max_length, self.config.truncation, ends)

    def compute_reward(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` (B, R): the score of each response at its last valid token, zero elsewhere."""
        config = self.config
        cut = Cut(config.use_dynamic_bsz, config.micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu)
        if self.switch is None:
            rows = {name: data.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        else:
            rows = self.switch(data)[0]
        scores = last_values(self.engine, rows, cut)
        placed = at_last_token(scores, data.batch["responses"], data.batch["attention_mask"])
        return DataProto.from_dict(tensors={"rm_scores": placed})


def _engine(
    kind: str, modules: Sequence[Any], optimizer: Any, hf_config: Any, config: Any, fuses_head: bool = False
) -> BaseEngine:
    return _of_modules(kind, modules, optimizer, hf_config, config.megatron, config.optimizer(), fuses_head)


def _of_modules(
    kind: str,
    modules: Iterable[Any],
    optimizer: Any,
    hf_config: Any,
    engine_config: Any,
    optimizer_config: Any,
    fuses_head: bool = False,
) -> BaseEngine:
    """Build the engine; importing it imports Megatron-Core."""
    cls: Any = EngineRegistry.get_engine_cls(kind, "megatron")
    from verl.workers.engine.megatron.given import engine_of_modules

    engine: BaseEngine = engine_of_modules(
        cls, list(modules), optimizer, hf_config, engine_config, optimizer_config, fuses_head
    )
    return engine
