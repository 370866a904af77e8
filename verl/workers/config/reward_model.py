"""The reward model: its model, its tokenizer, its engine, and how its batches are cut."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor import micro_batch_rules, positive_rules
from verl.workers.config.engine import NCCL_TIMEOUT_S, STRATEGIES, FSDPEngineConfig
from verl.workers.config.model import HFModelConfig

TRUNCATIONS = ("right", "left", "middle", "error")
MODEL_TYPES = ("discriminative",)


@dataclass
class RewardModelModelConfig(BaseConfig):
    """The model that scores, and the tokenizer of the policy whose responses it reads.

    ``input_tokenizer`` is null where both share tokenizer and chat template.
    """

    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    input_tokenizer: str | None = None
    external_lib: str | list[str] | None = None
    trust_remote_code: bool = False
    use_shm: bool = False
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)

    def as_model_config(self) -> HFModelConfig:
        """Return the node from which an engine builds the model; the tokenizer is loaded where it renders chats."""
        return HFModelConfig(
            path=self.path,
            external_lib=self.external_lib,
            trust_remote_code=self.trust_remote_code,
            use_shm=self.use_shm,
            use_remove_padding=self.use_remove_padding,
            enable_gradient_checkpointing=False,
            load_tokenizer=self.input_tokenizer is not None,
        )


@dataclass
class RewardModelConfig(BaseConfig):
    """A reward model on FSDP, which only infers."""

    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: int = 0
    nnodes: int = 0
    strategy: str = "fsdp"
    model_type: str = "discriminative"
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size: int | None = None
    micro_batch_size_per_gpu: int | None = None
    max_length: int | None = None
    truncation: str = "right"
    use_dynamic_bsz: bool = False
    forward_max_token_len_per_gpu: int = 32768
    ulysses_sequence_parallel_size: int = 1
    nccl_timeout: int = NCCL_TIMEOUT_S
    reward_manager: str = "naive"
    launch_reward_fn_async: bool = False
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    overlong_buffer: dict[str, Any] = field(default_factory=dict)
    scoring: dict[str, Any] = field(default_factory=dict)
    sandbox_fusion: dict[str, Any] = field(default_factory=dict)
    local_sandbox: dict[str, Any] = field(default_factory=dict)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, batch sizes that exclude each other, and values outside their range."""
        if self.strategy not in STRATEGIES:
            yield Violation("strategy", self.strategy, f"must be one of {', '.join(STRATEGIES)}")
        if self.model_type not in MODEL_TYPES:
            yield Violation(
                "model_type",
                self.model_type,
                "is not supported: write discriminative, or ask a generative judge by a scorer (recipe/genrm_remote)",
            )
        if self.truncation not in TRUNCATIONS:
            yield Violation("truncation", self.truncation, f"must be one of {', '.join(TRUNCATIONS)}")
        yield from positive_rules(
            self, "max_length", "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "nccl_timeout"
        )
        if self.enable and not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "micro_batch_size")
        if self.ulysses_sequence_parallel_size > 1 and not self.model["use_remove_padding"]:
            yield Violation(
                "ulysses_sequence_parallel_size",
                self.ulysses_sequence_parallel_size,
                "needs packed sequences: set reward_model.model.use_remove_padding=true",
            )


def with_targets(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``reward_model`` node, a plain mapping in the YAML, with the dataclasses that hold its checks."""
    model = {"_target_": "verl.workers.config.RewardModelModelConfig", **(node.get("model") or {})}
    return {"_target_": "verl.workers.config.RewardModelConfig", **node, "model": model}


def reward_model_config(node: Any) -> RewardModelConfig:
    """Build the dataclass of the ``reward_model`` node; a dataclass comes back as it is."""
    if isinstance(node, RewardModelConfig):
        return node
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    config: RewardModelConfig = omega_conf_to_dataclass(with_targets(plain))
    return config
