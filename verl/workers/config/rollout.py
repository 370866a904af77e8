"""Generation: engine, sampling, and the parts of multi-turn rollout."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation
from verl.utils.observe.rollout_trace import BACKENDS
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor import positive_rules

ROLLOUTS = ("vllm", "sglang", "hf")
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
MAX_TEMPERATURE_VLLM = 2.0
MAX_LORA_RANK_VLLM = 512
TRUNCATE_SIDES = ("left", "middle", "right")


def sampling_rules(config: Any) -> Iterator[Violation]:
    """Yield sampling parameters outside their range."""
    if config.temperature < 0:
        yield Violation("temperature", config.temperature, "must be 0 or more")
    if config.top_k < -1:
        yield Violation("top_k", config.top_k, "must be -1 or 0 (off) or 1 or more")
    if not 0 < config.top_p <= 1:
        yield Violation("top_p", config.top_p, "must be in (0, 1]")
    if config.n < 1:
        yield Violation("n", config.n, "must be 1 or more")


@dataclass
class SamplingConfig(BaseConfig):
    """Sampling at validation."""

    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0
    n: int = 1
    do_sample: bool = False

    def rules(self) -> Iterator[Violation]:
        """Yield values outside their range."""
        yield from sampling_rules(self)
        if self.do_sample and self.temperature == 0:
            yield Violation("temperature", self.temperature, "must be above 0 with do_sample=true")


@dataclass
class MultiTurnConfig(BaseConfig):
    """Multi-turn rollout with tools."""

    _mutable_fields = frozenset({"max_assistant_turns", "max_user_turns"})

    enable: bool = False
    max_assistant_turns: int | None = None
    tool_config_path: str | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"
    interaction_config_path: str | None = None
    use_inference_chat_template: bool = False
    tokenization_sanity_check_mode: str = "strict"
    format: str = "hermes"
    num_repeat_rollouts: int | None = None

    def rules(self) -> Iterator[Violation]:
        """Yield an unknown side of truncation."""
        side = self.tool_response_truncate_side
        if side not in TRUNCATE_SIDES:
            yield Violation("tool_response_truncate_side", side, f"must be one of {', '.join(TRUNCATE_SIDES)}")


@dataclass
class CustomAsyncServerConfig(BaseConfig):
    """A server class of the user's own."""

    path: str | None = None
    name: str | None = None


@dataclass
class AgentLoopConfig(BaseConfig):
    """The actors that run agent loops."""

    num_workers: int = 8
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: str | None = None
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)


@dataclass
class TraceConfig(BaseConfig):
    """Tracing of trajectories."""

    backend: str | None = None
    token2text: bool = False

    def rules(self) -> Iterator[Violation]:
        """Yield a backend that is not known, or whose package is not installed."""
        if self.backend not in (None, *BACKENDS):
            yield Violation("backend", self.backend, f"must be null or one of {', '.join(BACKENDS)}")
        elif self.backend is not None and importlib.util.find_spec(self.backend) is None:
            expected = f"needs the package {self.backend}, which is not installed: install it, or write null"
            yield Violation("backend", self.backend, expected)


@dataclass
class ServerConfig(BaseConfig):
    """Requests to a generation server; times in seconds."""

    timeout: float = 60.0
    max_attempts: int = 3
    retry_delay: float = 2.0
    max_connections: int = 1000
    max_start_wait_time: float = 300.0


@dataclass
class RolloutConfig(BaseConfig):
    """The generation engine of the actor."""

    _mutable_fields = frozenset({"max_model_len", "load_format"})

    name: str = "???"
    mode: str = "sync"
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1
    repetition_penalty: float = 1.0
    prompt_length: int = 512
    response_length: int = 512
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    ignore_eos: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    free_cache_engine: bool = True
    tensor_model_parallel_size: int = 2
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    load_format: str = "dummy"
    log_prob_micro_batch_size: int | None = None
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    disable_log_stats: bool = True
    do_sample: bool = True
    n: int = 1
    seed: int = 1
    over_sample_rate: float = 0
    multi_stage_wake_up: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: {"vllm": {}, "sglang": {}})
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    calculate_log_probs: bool = False
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    update_weights_bucket_megabytes: int = 512
    trace: TraceConfig = field(default_factory=TraceConfig)
    skip_rollout: bool = False
    skip_dump_dir: str = "/tmp/rollout_dump"
    skip_tokenizer_init: bool = True
    profiler: ProfilerConfig | None = None
    layered_summon: bool = False
    limit_images: int | None = None
    server: ServerConfig = field(default_factory=ServerConfig)
    sglang_engine_mode: str = "local"
    layer_name_map: dict[str, Any] = field(default_factory=dict)

    @property
    def workers_per_engine(self) -> int:
        """How many workers hold one generation engine; with transformers each worker has one."""
        return 1 if self.name == "hf" else self.tensor_model_parallel_size * self.data_parallel_size

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence that an engine takes."""
        return self.max_model_len or self.prompt_length + self.response_length

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, layouts that the engines do not have, and values outside their range."""
        if self.name == "???":
            yield Violation("name", self.name, f"is missing: write one of {', '.join(ROLLOUTS)}")
        elif self.name not in ROLLOUTS:
            yield Violation("name", self.name, f"must be one of {', '.join(ROLLOUTS)}")
        if self.mode not in ("sync", "async"):
            yield Violation("mode", self.mode, "must be sync or async")
        yield from sampling_rules(self)
        yield from self._size_rules()
        if self.dtype not in DTYPES:
            yield Violation("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            yield Violation("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        if self.name == "vllm":
            yield from self._vllm_rules()
        if self.repetition_penalty <= 0:
            yield Violation("repetition_penalty", self.repetition_penalty, "must be above 0; 1 is off")
        if self.log_prob_micro_batch_size is not None and self.log_prob_micro_batch_size_per_gpu is not None:
            yield Violation(
                "log_prob_micro_batch_size",
                self.log_prob_micro_batch_size,
                "is deprecated and excludes log_prob_micro_batch_size_per_gpu: set only the latter",
            )

    def _vllm_rules(self) -> Iterator[Violation]:
        """Yield temperatures that vLLM would refuse at the first request."""
        for key, value in (
            ("temperature", self.temperature),
            ("val_kwargs.temperature", self.val_kwargs.get("temperature", 0)),
        ):
            if value > MAX_TEMPERATURE_VLLM:
                yield Violation(key, value, f"must be at most {MAX_TEMPERATURE_VLLM} with vllm")

    def _size_rules(self) -> Iterator[Violation]:
        yield from positive_rules(
            self,
            "prompt_length",
            "response_length",
            "tensor_model_parallel_size",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "max_num_batched_tokens",
            "max_model_len",
            "max_num_seqs",
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu",
            "update_weights_bucket_megabytes",
        )
        ranks = self.tensor_model_parallel_size * self.data_parallel_size
        if self.expert_parallel_size not in (1, ranks):
            expected = f"must be 1 or tensor_model_parallel_size x data_parallel_size = {ranks}"
            yield Violation("expert_parallel_size", self.expert_parallel_size, expected)
        if self.pipeline_model_parallel_size > 1:
            expected = f"is not supported by {self.name}: write 1, and use tensor_model_parallel_size"
            yield Violation.unsupported("pipeline_model_parallel_size", self.pipeline_model_parallel_size, expected)
        if not 0 <= self.over_sample_rate < 1:
            yield Violation("over_sample_rate", self.over_sample_rate, "must be in [0, 1)")
