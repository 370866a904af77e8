"""The reward model: its model, its tokenizers, its engine, how batches are cut, and what a generative one is asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.base_config import BaseConfig, Violation, setting
from verl.utils.profiler.config import ProfilerConfig
from verl.utils.structured import omega_conf_to_dataclass
from verl.workers.config.actor import micro_batch_rules, positive_rules
from verl.workers.config.engine import NCCL_TIMEOUT_S, STRATEGIES, FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.reward import LocalSandboxConfig, OverlongBufferConfig, SandboxFusionConfig, ScoringConfig
from verl.workers.config.rollout import RolloutConfig, SamplingConfig

TRUNCATIONS = ("right", "left", "middle", "error")
MODEL_TYPES = ("discriminative", "generative")
GENERATORS = ("vllm", "hf")
WITHOUT_MODEL = (
    "enable",
    "enable_resource_pool",
    "reward_manager",
    "reward_kwargs",
    "launch_reward_fn_async",
    "overlong_buffer",
    "scoring",
    "sandbox_fusion",
    "local_sandbox",
)
"""Keys of ``reward_model`` that are read without a reward model too."""


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
class RewardDataProcessorConfig(BaseConfig):
    """Functions of the user's own file around a generative reward model.

    ``preprocess(rollout_question=, rollout_response=, ground_truth=)`` returns what it is asked, ``postprocess(text)``
    the score in its answer.
    """

    path: str | None = None
    preprocess_fn_name: str = "preprocess"
    postprocess_fn_name: str = "postprocess"


@dataclass
class RewardModelConfig(BaseConfig):
    """A reward model, which only infers: a classifier on FSDP or Megatron-Core, or a generative one on a rollout
    engine.
    """

    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: int = 0
    nnodes: int = 0
    strategy: str = "fsdp"
    model_type: str = "discriminative"
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    megatron: McoreEngineConfig | None = None
    load_weight: bool = True
    micro_batch_size: int | None = None
    micro_batch_size_per_gpu: int | None = None
    max_length: int | None = None
    truncation: str = "right"
    use_dynamic_bsz: bool = False
    forward_max_token_len_per_gpu: int = 32768
    ulysses_sequence_parallel_size: int = 1
    name: str = "vllm"
    prompt_length: int = 1024
    response_length: int = 0
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True
    tensor_model_parallel_size: int = 2
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    data_processor_config: RewardDataProcessorConfig = field(default_factory=RewardDataProcessorConfig)
    nccl_timeout: int = NCCL_TIMEOUT_S
    reward_manager: str = setting("naive", "what turns responses into scores", empty=False)
    launch_reward_fn_async: bool = False
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    overlong_buffer: OverlongBufferConfig | None = None
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    local_sandbox: LocalSandboxConfig = field(default_factory=LocalSandboxConfig)
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, batch sizes that exclude each other, and values outside their range."""
        if self.strategy not in (*STRATEGIES, "megatron"):
            yield Violation("strategy", self.strategy, f"must be one of {', '.join(STRATEGIES)}, megatron")
        elif self.strategy == "megatron" and self.megatron is None:
            expected = "needs the keys of Megatron-Core: choose reward_model@reward_model=megatron_reward_model"
            yield Violation("strategy", self.strategy, expected)
        if not self.load_weight and self.strategy != "megatron":
            yield Violation("load_weight", False, "is of strategy=megatron: write true")
        if self.model_type not in MODEL_TYPES:
            yield Violation("model_type", self.model_type, f"must be one of {', '.join(MODEL_TYPES)}")
        if self.truncation not in TRUNCATIONS:
            yield Violation("truncation", self.truncation, f"must be one of {', '.join(TRUNCATIONS)}")
        yield from positive_rules(
            self, "max_length", "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "nccl_timeout"
        )
        if self.is_generative:
            yield from self._generative_rules()
        elif self.enable and not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "micro_batch_size")
        if self.ulysses_sequence_parallel_size > 1 and not self.model["use_remove_padding"]:
            yield Violation(
                "ulysses_sequence_parallel_size",
                self.ulysses_sequence_parallel_size,
                "needs packed sequences: set reward_model.model.use_remove_padding=true",
            )

    @property
    def engine(self) -> Any:
        """The node of the engine that runs a classifier."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

    @property
    def is_generative(self) -> bool:
        """Whether the score stands in a text that the model writes."""
        return self.model_type == "generative"

    def _generative_rules(self) -> Iterator[Violation]:
        if self.name not in GENERATORS:
            yield Violation("name", self.name, f"must be one of {', '.join(GENERATORS)}")
        elif self.name == "vllm" and not self.enable_resource_pool:
            expected = "needs workers of its own: set reward_model.enable_resource_pool=true, or write hf"
            yield Violation("name", self.name, expected)
        yield from positive_rules(
            self, "prompt_length", "response_length", "tensor_model_parallel_size", "max_model_len", "max_num_seqs"
        )
        if self.model["input_tokenizer"] is None:
            expected = "must name the policy's tokenizer: a generative reward model reads text"
            yield Violation("model.input_tokenizer", None, expected)
        if self.data_processor_config["path"] is None:
            expected = "is missing: write the Python file that holds preprocess and postprocess"
            yield Violation("data_processor_config.path", None, expected)

    def as_rollout_config(self) -> RolloutConfig:
        """Return the node of the engine that a generative reward model writes with; it loads its own weights."""
        shared = (
            *("name", "prompt_length", "response_length", "dtype", "gpu_memory_utilization", "enforce_eager"),
            *("tensor_model_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
            *("enable_chunked_prefill", "enable_prefix_caching"),
        )
        sampling: Any = self.sampling_config
        return RolloutConfig(
            **{name: self[name] for name in shared},
            **{name: sampling[name] for name in ("temperature", "top_k", "top_p", "do_sample")},
            engine_kwargs={"vllm": {}, "sglang": {}, **self.engine_kwargs},
            load_format="auto",
            free_cache_engine=False,
        )


def with_targets(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``reward_model`` node, a plain mapping in the YAML, with the dataclasses that hold its checks.

    What else stands there belongs to the reward functions.
    """
    known = {each.name for each in fields(RewardModelConfig)}
    inner = {
        "model": "RewardModelModelConfig",
        "data_processor_config": "RewardDataProcessorConfig",
        "sampling_config": "SamplingConfig",
    }
    typed = {
        name: {"_target_": f"verl.workers.config.{cls}", **(node.get(name) or {})}
        for name, cls in inner.items()
        if isinstance(node.get(name) or {}, Mapping)
    }
    if isinstance(node.get("megatron"), Mapping):
        typed["megatron"] = {"_target_": "verl.workers.config.McoreEngineConfig", **node["megatron"]}
    own = {name: value for name, value in node.items() if name in known}
    return {"_target_": "verl.workers.config.RewardModelConfig", **own, **typed}


def reward_model_config(node: Any) -> RewardModelConfig:
    """Build the dataclass of the ``reward_model`` node; a dataclass comes back as it is."""
    if isinstance(node, RewardModelConfig):
        return node
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    typed = with_targets(plain)
    for name, cls in (
        ("scoring", "ScoringConfig"),
        ("sandbox_fusion", "SandboxFusionConfig"),
        ("local_sandbox", "LocalSandboxConfig"),
    ):
        if isinstance(typed.get(name), Mapping):
            typed[name] = {"_target_": f"verl.workers.config.reward.{cls}", **typed[name]}
    config: RewardModelConfig = omega_conf_to_dataclass(typed)
    return config
