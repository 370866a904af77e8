"""Generation: engine, sampling, and the parts of multi-turn rollout."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation, setting
from verl.utils.engine_arguments import wrong_sglang_arguments, wrong_vllm_arguments
from verl.utils.json_types import Json, mapping_at
from verl.utils.observe.rollout_trace import BACKENDS
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.engines import ENGINES, NAMES, Demand, arguments_key, class_outside

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
MAX_TEMPERATURE_VLLM = 2.0
MAX_PENALTY_SGLANG = 2.0
MIN_TEMPERATURE = 0.01
"""The least temperature above 0: logits divided by a lower one leave no probability but 0 and 1."""
MOST_RESPONSES = 2**16
MAX_LORA_RANK_VLLM = 512
ON_FAILURE = ("fail", "retry", "drop", "replace")


def cold_rules(temperature: float) -> Iterator[Violation]:
    """Yield a temperature that is neither 0 (greedy) nor large enough for sampling."""
    if 0 < temperature < MIN_TEMPERATURE:
        yield Violation("temperature", temperature, f"must be 0 or at least {MIN_TEMPERATURE}")


NEED_FILES = frozenset(
    (
        *("quantization", "model_loader_extra_config", "speculative_config", "speculative_algorithm"),
        *("speculative_draft_model_path",),
    )
)
"""Arguments of engines that add weights to those of a trainer, or that say how files are read."""
_WRONG_ARGUMENTS = {"vllm": wrong_vllm_arguments, "sglang": wrong_sglang_arguments}


def engine_argument_rules(engine: str, engine_kwargs: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield arguments that the engine lacks, that other keys decide, or that no engine reads."""
    for name, given in engine_kwargs.items():
        is_outside = class_outside(engine) is not None and name == arguments_key(engine)
        if name not in _WRONG_ARGUMENTS and given and not is_outside:
            engines = "vllm or sglang" if class_outside(engine) is None else f"{arguments_key(engine)}, vllm or sglang"
            expected = f"is no engine with arguments: write {engines}, and the arguments below it"
            yield Violation(f"engine_kwargs.{name}", given, expected)
    if engine in _WRONG_ARGUMENTS:
        own = mapping_at(engine_kwargs, engine)
        for name, expected in _WRONG_ARGUMENTS[engine]([name for name in own if own[name] is not None]):
            yield Violation(f"engine_kwargs.{engine}.{name}", own[name], expected)


def serves(rollout: Mapping[str, Any]) -> bool:
    """Return whether the engine of a rollout node answers single requests."""
    return rollout["mode"] == "async" or (rollout["name"] == "sglang" and rollout["multi_turn"]["enable"])


@dataclass
class SamplingConfig(BaseConfig):
    """Sampling at validation."""

    _is_closed = True

    top_k: int = setting(-1, "most likely tokens to draw from; -1 or 0: all", at_least=-1)
    top_p: float = setting(1.0, "probability of the tokens to draw from", above=0, at_most=1)
    temperature: float = setting(0, "divisor of the logits", at_least=0)
    n: int = setting(1, "responses of one prompt", at_least=1, at_most=MOST_RESPONSES)
    do_sample: bool = setting(False, "draw tokens; else take the most likely")

    def rules(self) -> Iterator[Violation]:
        """Yield sampling without a temperature, or with a temperature close to 0."""
        yield from cold_rules(self.temperature)
        if self.do_sample and self.temperature == 0:
            yield Violation("temperature", self.temperature, "must be above 0 with do_sample=true")


@dataclass
class MultiTurnConfig(BaseConfig):
    """Turns of a conversation, for the agent loop ``tool_agent``."""

    _mutable_fields = frozenset({"max_assistant_turns", "max_user_turns"})

    enable: bool = setting(False, "responses may have several turns")
    max_assistant_turns: int | None = setting(None, "assistant turns; null: as many as fit the context", at_least=1)
    tool_config_path: str | None = setting(None, "YAML file that describes the tools")
    function_tool_path: str | None = setting(None, "Python file whose public functions are tools")
    max_user_turns: int | None = setting(None, "turns of user and tools; null: as many as fit the context", at_least=1)
    max_parallel_calls: int = setting(1, "tool calls that one turn runs", at_least=1)
    max_tool_response_length: int = setting(256, "characters kept of the answer of a tool", at_least=1)
    tool_response_truncate_side: str = setting("middle", "part to cut", one_of=("left", "middle", "right"))
    interaction_config_path: str | None = setting(None, "YAML file that describes the interactions")
    use_inference_chat_template: bool = setting(False, "render the whole chat again in each turn")
    tokenization_sanity_check_mode: str = setting(
        "strict", "how turns are compared with the whole chat", one_of=("disable", "strict", "ignore_strippable")
    )
    format: str = setting("hermes", "parser of tool calls")
    num_repeat_rollouts: int | None = setting(None, "conversations that go on from a turn; null: one", at_least=1)


@dataclass
class CustomAsyncServerConfig(BaseConfig):
    """A user's server class."""

    path: str | None = setting(None, "Python file that holds the class")
    name: str | None = setting(None, "name of the class")


@dataclass
class AgentLoopConfig(BaseConfig):
    """The actors that run agent loops."""

    num_workers: int = setting(8, "actors that run agent loops", at_least=1)
    default_agent_loop: str = setting("single_turn_agent", "loop of rows without agent_name")
    agent_loop_config_path: str | None = setting(None, "YAML list of further loops")
    on_failure: str = setting("fail", "what a failed trajectory leads to", one_of=ON_FAILURE)
    num_retries: int = setting(2, "further attempts at a failed trajectory, unless on_failure=fail", at_least=0)
    turn_timeout_s: float | None = setting(3600.0, "seconds of one request to a server; null: no limit", above=0)
    tool_timeout_s: float | None = setting(600.0, "seconds of one call of a tool; null: no limit", above=0)
    trajectory_timeout_s: float | None = setting(5400.0, "seconds of one attempt at a trajectory", above=0)
    step_timeout_s: float | None = setting(6900.0, "seconds of all trajectories of a step", above=0)
    server_timeout_s: float = setting(120.0, "seconds after which a silent server counts as gone", above=0)
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)


@dataclass
class TraceConfig(BaseConfig):
    """Tracing of trajectories."""

    backend: str | None = setting(None, "where traces go; null: nowhere", one_of=BACKENDS)
    token2text: bool = setting(False, "traces hold texts as well as tokens")
    project_name: str | None = setting(None, "project of the traces; null: trainer.project_name")
    experiment_name: str | None = setting(None, "run in the traces; null: trainer.experiment_name")
    max_samples_per_step_per_worker: int | None = setting(
        None, "prompts that one worker traces in a step, with all their responses; null: all", at_least=1
    )

    def rules(self) -> Iterator[Violation]:
        """Yield a backend whose package is not installed."""
        if self.backend in BACKENDS and importlib.util.find_spec(self.backend) is None:
            expected = f"needs the package {self.backend}, which is not installed: install it, or write null"
            yield Violation("backend", self.backend, expected)


@dataclass
class ServerConfig(BaseConfig):
    """Requests to a generation server; times in seconds."""

    timeout: float = setting(60.0, "limit of one request")
    max_attempts: int = setting(3, "attempts at one request")
    retry_delay: float = setting(2.0, "pause before another attempt")
    max_connections: int = setting(1000, "connections open at once")
    max_start_wait_time: float | None = setting(
        None, "limit of the start of a server; null: 300 on a CPU, 1800 on accelerators", above=0
    )
    heartbeat_timeout: float = setting(60.0, "limit of an engine's silence, before it counts as dead", above=0)


def start_limit_s(written: float | None, device: str) -> float:
    """Return the time limit for the start of a server; models of 32B and more take many minutes on accelerators.

    Args: ``written`` is ``server.max_start_wait_time``, ``device`` the kind of the server's devices.
    """
    return written or (300.0 if device == "cpu" else 1800.0)


@dataclass
class LogProbConfig(BaseConfig):
    """Batch sizes of the passes that compute log-probs, with the actor or with the reference."""

    log_prob_micro_batch_size: int | None = setting(None, "deprecated: sequences over all workers", at_least=1)
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a pass of one worker", at_least=1)
    log_prob_use_dynamic_bsz: bool = setting(False, "fill a pass up to a number of tokens")
    log_prob_max_token_len_per_gpu: int = setting(16384, "tokens of a pass of one worker", at_least=1)


@dataclass
class RolloutConfig(LogProbConfig):
    """The generation engine of the actor."""

    _mutable_fields = frozenset({"max_model_len", "load_format"})

    name: str = setting("???", f"generation engine: {NAMES}")
    mode: str = setting("sync", "whether a server generates", one_of=("sync", "async"))
    nnodes: int = setting(1, "nodes of standalone servers", at_least=1)
    n_gpus_per_node: int = setting(8, "devices of each node of standalone servers", at_least=1)
    temperature: float = setting(1.0, "divisor of the logits", at_least=0)
    top_k: int = setting(-1, "most likely tokens to draw from; -1 or 0: all", at_least=-1)
    top_p: float = setting(1, "probability of the tokens to draw from", above=0, at_most=1)
    repetition_penalty: float = setting(1.0, "divisor of the logits of earlier tokens", above=0, hint="1 is off")
    prompt_length: int = setting(512, "tokens of the longest prompt", at_least=1)
    response_length: int = setting(512, "tokens of the longest response", at_least=1)
    dtype: str = setting("bfloat16", "dtype of weights and cache", one_of=DTYPES)
    gpu_memory_utilization: float = setting(0.5, "share of the device's memory", above=0, at_most=1)
    ignore_eos: bool = setting(False, "generate past the end token")
    enforce_eager: bool = setting(False, "capture no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = setting(None, "batch sizes with a CUDA graph")
    free_cache_engine: bool = setting(True, "free the cache while the workers train")
    tensor_model_parallel_size: int = setting(2, "workers that share each layer", at_least=1)
    data_parallel_size: int = setting(1, "replicas in one engine", at_least=1)
    expert_parallel_size: int = setting(1, "workers that share the experts", at_least=1)
    pipeline_model_parallel_size: int = setting(1, "stages of layers", at_least=1)
    max_num_batched_tokens: int = setting(8192, "tokens of one pass of the engine", at_least=1, at_most=2**24)
    max_model_len: int | None = setting(None, "tokens of the longest sequence", at_least=1)
    max_num_seqs: int = setting(1024, "sequences of one pass of the engine", at_least=1, at_most=2**16)
    enable_chunked_prefill: bool = setting(True, "a prompt may take several passes")
    enable_prefix_caching: bool = setting(True, "prompts with the same beginning share its cache")
    load_format: str = setting("dummy", "where the first weights come from")
    disable_log_stats: bool = setting(True, "the engine logs no statistics; traces of vllm need them and turn them on")
    do_sample: bool = setting(True, "draw tokens; else take the most likely")
    n: int = setting(1, "responses of one prompt", at_least=1, at_most=MOST_RESPONSES)
    batch_invariant: bool | None = setting(None, "no response depends on others; null: on CPU in fp32 with one thread")
    seed: int = setting(1, "seed of the engine", at_least=0, at_most=2**32 - 1)
    over_sample_rate: float = setting(0, "share of trajectories that a step gives up", at_least=0, below=1)
    multi_stage_wake_up: bool = setting(False, "no effect: there is one implementation")
    engine_kwargs: dict[str, Any] = setting({"vllm": {}, "sglang": {}}, "engine arguments by engine name")
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    calculate_log_probs: bool = setting(False, "return the log-probs of the sampled tokens")
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    update_weights_bucket_megabytes: int = setting(512, "megabytes of one weight bucket", at_least=1)
    share_weights: bool = setting(False, "trainer and engine hold one copy of the weights")
    trace: TraceConfig = field(default_factory=TraceConfig)
    skip_rollout: bool = setting(False, "read responses from skip_dump_dir if it has them")
    skip_dump_dir: str = setting("/tmp/rollout_dump", "folder of kept responses")
    skip_steps: list[int] | None = setting(None, "training steps that read kept responses; null: all")
    skip_action: str = setting("cache", "a step has its responses, or that of the first", one_of=("cache", "repeat"))
    skip_tokenizer_init: bool = setting(True, "the engine loads no tokenizer")
    profiler: ProfilerConfig | None = setting(None, "profiling of this role")
    layered_summon: bool = setting(False, "gather adapters layer by layer")
    limit_images: int | None = setting(None, "images per prompt")
    server: ServerConfig = field(default_factory=ServerConfig)
    sglang_engine_mode: str = setting("local", "must be local; hybrid_engine=false starts servers")
    layer_name_map: dict[str, Any] = setting({}, "no effect: there is one implementation")

    @property
    def workers_per_engine(self) -> int:
        """Number of workers that share one generation engine; with transformers it is 1."""
        is_alone = self.name in ENGINES and not ENGINES[self.name].spans_workers
        return 1 if is_alone else self.tensor_model_parallel_size * self.data_parallel_size

    @property
    def serves(self) -> bool:
        """Whether the engine answers single requests; with sglang, ``multi_turn.enable`` asks for it too."""
        return serves(self)

    def demand(self, device: str, node: str = "actor_rollout_ref.rollout") -> Demand:
        """Return the demands of this node on the engine, on the devices of the workers."""
        mode = "async" if self.serves else self.mode
        return Demand(node, mode, device, self.workers_per_engine, self.load_format, self.share_weights)

    @property
    def default_loop(self) -> str:
        """The agent loop of rows without ``agent_name``: the configured one, else ``tool_agent`` if there are turns."""
        chosen = self.agent.default_agent_loop
        return "tool_agent" if self.multi_turn.enable and chosen == AgentLoopConfig.default_agent_loop else chosen

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence that an engine takes."""
        return self.max_model_len or self.prompt_length + self.response_length

    def rules(self) -> Iterator[Violation]:
        """Yield a name of no engine, layouts that the engines do not have, and keys that exclude each other.

        A user's engine is checked when its class is imported; see ``Demand``.
        """
        yield from cold_rules(self.temperature)
        if self.name == "???":
            yield Violation("name", self.name, f"is missing: write one of {NAMES}")
        elif self.name not in ENGINES and class_outside(self.name) is None:
            yield Violation("name", self.name, f"must be one of {NAMES}")
            return
        if self.name == "vllm":
            validation = self.val_kwargs.get("temperature", 0)
            for key, value in (("temperature", self.temperature), ("val_kwargs.temperature", validation)):
                if value > MAX_TEMPERATURE_VLLM:  # vLLM would reject the first request, long after the start
                    yield Violation(key, value, f"must be at most {MAX_TEMPERATURE_VLLM} with vllm")
        if self.batch_invariant and self.name == "hf":
            yield Violation("batch_invariant", True, "is not supported by hf: write null, or name=vllm")
        if self.name in ENGINES and self.mode not in ENGINES[self.name].modes:
            yield Violation("mode", self.mode, f"has no server with name={self.name}: write sync, or name=vllm")
        ranks = self.tensor_model_parallel_size * self.data_parallel_size
        if self.expert_parallel_size not in (1, ranks):
            expected = f"must be 1 or tensor_model_parallel_size x data_parallel_size = {ranks}"
            yield Violation("expert_parallel_size", self.expert_parallel_size, expected)
        elif self.name == "sglang" and self.expert_parallel_size not in (1, self.tensor_model_parallel_size):
            expected = f"must be 1 or tensor_model_parallel_size={self.tensor_model_parallel_size} with name=sglang"
            yield Violation("expert_parallel_size", self.expert_parallel_size, expected)
        yield from engine_argument_rules(self.name, self.engine_kwargs)
        if self.name == "sglang":
            if self.repetition_penalty > MAX_PENALTY_SGLANG:
                expected = f"must be at most {MAX_PENALTY_SGLANG} with sglang"
                yield Violation("repetition_penalty", self.repetition_penalty, expected)
            port = (self.engine_kwargs.get("sglang") or {}).get("nccl_port")
            if port is not None and self.data_parallel_size > 1:
                expected = f"must be null with data_parallel_size={self.data_parallel_size}: each group takes its own"
                yield Violation("engine_kwargs.sglang.nccl_port", port, expected)
        if self.pipeline_model_parallel_size > 1:
            expected = f"is not supported by {self.name}: write 1, and use tensor_model_parallel_size"
            yield Violation.unsupported("pipeline_model_parallel_size", self.pipeline_model_parallel_size, expected)
        if self.log_prob_micro_batch_size is not None and self.log_prob_micro_batch_size_per_gpu is not None:
            expected = "is deprecated and excludes log_prob_micro_batch_size_per_gpu: set only the latter"
            yield Violation("log_prob_micro_batch_size", self.log_prob_micro_batch_size, expected)
