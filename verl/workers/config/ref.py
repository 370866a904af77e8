"""The reference policy: how its log-probs are computed, and the engine that computes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, setting
from verl.utils.profiler.config import ProfilerConfig
from verl.utils.structured import build_node
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig


@dataclass
class RefConfig(BaseConfig):
    """The reference policy, whatever its engine."""

    strategy: str = setting("fsdp", "training engine", one_of=("fsdp", "fsdp2", "megatron"))
    use_torch_compile: bool = setting(True, "every value means the one implementation")
    log_prob_micro_batch_size: int | None = setting(
        None, "deprecated: sequences of a pass over all workers", at_least=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a pass of one worker", at_least=1)
    log_prob_use_dynamic_bsz: bool = setting(False, "fill a pass up to a number of tokens")
    log_prob_max_token_len_per_gpu: int = setting(16384, "tokens of a pass of one worker", at_least=1)
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
    entropy_from_logits_with_chunking: bool = setting(False, "compute log-probs 2048 rows at a time")
    entropy_checkpointing: bool = setting(False, "every value means the one implementation")

    @property
    def engine(self) -> FSDPEngineConfig:
        """The node of the engine."""
        return self.fsdp_config


@dataclass
class McoreRefConfig(RefConfig):
    """The reference policy on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=("fsdp", "fsdp2", "megatron"))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")

    @property
    def engine(self) -> McoreEngineConfig:
        """The node of the engine."""
        return self.megatron


def ref_class(node: Mapping[str, Any]) -> type[FSDPRefConfig | McoreRefConfig]:
    """Return the dataclass of a ``ref`` node, which names none: by the layout that it holds."""
    return McoreRefConfig if isinstance(node.get("megatron"), Mapping) else FSDPRefConfig


def ref_config(node: Any) -> FSDPRefConfig | McoreRefConfig | None:
    """Build the dataclass of a ``ref`` node; a dataclass, or None, comes back as it is. Unknown keys are left out."""
    return None if node is None else build_node(node, ref_class(node))
