"""The node of the shared workers: the policy under training, its generation engine and the reference policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.base_config import MOST_SECONDS, BaseConfig, setting
from verl.utils.engine_versions import STANDALONE
from verl.utils.json_types import Json
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor_critic import ActorConfig
from verl.workers.config.engine import ALL_STRATEGIES, NCCL_TIMEOUT_S, FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.rollout import LogProbConfig, RolloutConfig


@dataclass
class RefConfig(LogProbConfig):
    """The reference policy, on any engine."""

    strategy: str = setting("fsdp", "training engine", one_of=ALL_STRATEGIES)
    use_torch_compile: bool = setting(True, "no effect: there is one implementation")
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)
    model: dict[str, Any] | None = setting(None, "keys of actor_rollout_ref.model that differ for the reference")
    ulysses_sequence_parallel_size: int = setting(1, "workers that share each sequence", at_least=1)

    @property
    def engine(self) -> BaseConfig:
        """The node of the engine."""
        return BaseConfig()

    @property
    def model_path(self) -> str | None:
        """The path of a model that differs from the actor's."""
        return (self.model or {}).get("path")


@dataclass
class FSDPRefConfig(RefConfig):
    """The reference policy on FSDP."""

    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    entropy_from_logits_with_chunking: bool = setting(False, "compute log-probs some rows at a time")
    entropy_from_logits_chunk_size: int = setting(2048, "those rows", at_least=1)
    entropy_checkpointing: bool = setting(False, "no effect: there is one implementation")

    @property
    def engine(self) -> FSDPEngineConfig:
        """The node of the engine."""
        return self.fsdp_config


@dataclass
class McoreRefConfig(RefConfig):
    """The reference policy on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=ALL_STRATEGIES)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")

    @property
    def engine(self) -> McoreEngineConfig:
        """The node of the engine."""
        return self.megatron


def ref_class(node: Mapping[str, Json]) -> type[FSDPRefConfig | McoreRefConfig]:
    """Return the dataclass of a ``ref`` node: the node names no strategy, so the key ``megatron`` decides."""
    return McoreRefConfig if isinstance(node.get("megatron"), Mapping) else FSDPRefConfig


@dataclass
class ActorRolloutRefConfig(BaseConfig):
    """The policy, its rollout and its reference, which share processes and devices."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=FSDPRefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: HFModelConfig = field(default_factory=HFModelConfig)
    hybrid_engine: bool = setting(True, "actor and rollout share their devices")
    nccl_timeout: float = setting(NCCL_TIMEOUT_S, "seconds that a collective may take", above=0, at_most=MOST_SECONDS)

    @property
    def engine_mode(self) -> str:
        """The mode of the rollout engines: ``rollout.mode``, or ``standalone`` if they have separate devices."""
        return self.rollout.mode if self.hybrid_engine else STANDALONE

    @property
    def reference_is_in_actor(self) -> bool:
        """Whether the actor's workers hold the reference: the base model under the adapters, or a separate model."""
        return self.model.lora_rank > 0 or self.actor.holds_reference


def is_hybrid(config: DictConfig) -> bool:
    """Whether actor and rollout share their devices in a run whose tree might leave ``hybrid_engine`` out."""
    found: bool | None = OmegaConf.select(config, "actor_rollout_ref.hybrid_engine")
    return ActorRolloutRefConfig.hybrid_engine if found is None else found
