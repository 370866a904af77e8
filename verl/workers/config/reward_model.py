"""Scoring: the scorer of the user, its limits, where code under test runs, and the reward model."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import MOST_SECONDS, BaseConfig, Violation, setting, type_hints
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor_critic import micro_batch_rules, packing_rules
from verl.workers.config.engine import ALL_STRATEGIES, NCCL_TIMEOUT_S, FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.engines import ROLLOUTS, SERVED_ROLLOUTS
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optimizer import OptimizerConfig
from verl.workers.config.rollout import RolloutConfig, SamplingConfig, engine_argument_rules

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


DEFAULT_SCORER = "compute_score"
"""Name of the function where ``custom_reward_function.name`` is null."""


@dataclass
class CustomRewardFunctionConfig(BaseConfig):
    """A scorer of the user, in place of the one that the data source selects."""

    path: str | None = setting(None, "Python file or pkg://module that defines the scorer")
    name: str | None = setting(DEFAULT_SCORER, f"name of the function; null: {DEFAULT_SCORER}", empty=False)
    reward_kwargs: dict[str, Any] = setting({}, "further arguments of the function")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["name"] = self.name or DEFAULT_SCORER


@dataclass
class ScoringConfig(BaseConfig):
    """Limits of scoring: its time limits, and the score of a response that cannot be scored."""

    failure_score: float | None = setting(None, "score of a response whose scorer fails; null: the lowest")
    timeout_s: float = setting(300, "seconds to score one response", above=0, at_most=MOST_SECONDS)
    batch_timeout_s: float = setting(1800, "seconds to score all responses of a step", above=0, at_most=MOST_SECONDS)
    max_failed_ratio: float | None = setting(
        None, "share of a batch that may fail; null: all but the whole batch", at_least=0, at_most=1
    )
    isolate: bool | None = setting(None, "call a custom scorer in a process; null: unless its file imports ray")

    def rules(self) -> Iterator[Violation]:
        """Yield an infinite score."""
        if self.failure_score is not None and not math.isfinite(self.failure_score):
            yield Violation("failure_score", self.failure_score, "must be a finite number")


@dataclass
class SandboxFusionConfig(BaseConfig):
    """A service that runs code under test."""

    url: str | None = setting(None, "address that programs are posted to; null runs them here")
    max_concurrent: int = setting(64, "requests at once, from all processes of a machine", at_least=1)
    memory_limit_mb: int = setting(1024, "megabytes of memory of one program", at_least=1)

    def rules(self) -> Iterator[Violation]:
        """Yield an address that is no URL."""
        if self.url is not None and re.match(r"https?://[^/\s]+", self.url) is None:
            yield Violation("url", self.url, "must be null or an address such as http://host:8080/run_code")


@dataclass
class LocalSandboxConfig(BaseConfig):
    """The local sandbox for code under test."""

    timeout_s: float = setting(
        10, "seconds of processor time of one program on one input", above=0, at_most=MOST_SECONDS
    )
    allow_unisolated: bool = setting(False, "run code even if the kernel cannot isolate it")


@dataclass
class OverlongBufferConfig(BaseConfig):
    """A penalty on responses that come close to the limit.

    Source: DAPO (arXiv:2503.14476), section 3.4.
    """

    _is_closed = True

    enable: bool = setting(False, "subtract the penalty")
    len: int = setting(0, "tokens before the limit in which the penalty grows")
    penalty_factor: float = setting(0.0, "penalty of a response of full length")
    log: bool = setting(False, "report penalties as metrics")


@dataclass
class RewardModelModelConfig(BaseConfig):
    """The model that scores, and the tokenizer of the policy whose responses it reads.

    ``input_tokenizer`` is null where both share tokenizer and chat template.
    """

    _is_closed = True

    path: str = setting("~/models/FsfairX-LLaMA3-RM-v0.1", "folder or hub id of the model")
    input_tokenizer: str | None = setting(None, "folder or hub id of the policy's tokenizer")
    external_lib: str | list[str] | None = setting(None, "modules that workers import first")
    trust_remote_code: bool = setting(False, "code from the model's repository may run")
    use_shm: bool = setting(False, "load from a copy in shared memory")
    use_remove_padding: bool = setting(False, "pack sequences instead of padding them")
    use_prefix_sharing: bool = setting(False, "compute tokens that rows begin with once")
    use_fused_kernels: bool = setting(False, "no effect: there is one implementation")
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)

    @property
    def paths(self) -> dict[str, str]:
        """The models that are loaded, by key."""
        return {"path": self.path}

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """The optimizer of a model that learns, as in the PRIME recipe; None for one that only scores."""
        return None

    def as_model_config(self) -> HFModelConfig:
        """Return the node from which an engine builds the model; the tokenizer is loaded where it renders chats."""
        shared = ("path", "external_lib", "trust_remote_code", "use_shm", "use_remove_padding", "use_prefix_sharing")
        return HFModelConfig(
            **{name: self[name] for name in shared},
            enable_gradient_checkpointing=False,
            load_tokenizer=self.input_tokenizer is not None,
        )


@dataclass
class RewardModelDataProcessorConfig(BaseConfig):
    """Functions of the user around a generative reward model.

    ``preprocess(rollout_question=, rollout_response=, ground_truth=)`` writes the question, ``postprocess(text)`` reads
    the score from the answer.
    """

    _is_closed = True

    path: str | None = setting(None, "Python file or pkg://module that defines both")
    preprocess_fn_name: str = setting("preprocess", "name of the first")
    postprocess_fn_name: str = setting("postprocess", "name of the second")


@dataclass
class RewardModelConfig(BaseConfig):
    """A reward model, which only infers: a classifier on FSDP or Megatron-Core, or a generative one on a rollout
    engine. Other keys of its node belong to the reward functions.
    """

    enable: bool = setting(False, "score by a model")
    enable_resource_pool: bool = setting(False, "the model has workers that it shares with no other role")
    n_gpus_per_node: int = setting(0, "those workers on each node")
    nnodes: int = setting(0, "nodes with such workers")
    strategy: str = setting("fsdp", "engine of a classifier", one_of=ALL_STRATEGIES)
    model_type: str = setting("discriminative", "classifier or judge", one_of=("discriminative", "generative"))
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    megatron: McoreEngineConfig | None = setting(None, "Megatron-Core engine, with strategy=megatron")
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")
    micro_batch_size: int | None = setting(None, "deprecated: sequences of a pass over all workers", at_least=1)
    micro_batch_size_per_gpu: int | None = setting(None, "sequences of a pass of one worker", at_least=1)
    max_length: int | None = setting(None, "tokens of the longest chat; null: what the policy has", at_least=1)
    truncation: str = setting("right", "what happens to longer ones", one_of=("right", "left", "middle", "error"))
    use_dynamic_bsz: bool = setting(False, "fill a pass up to a number of tokens")
    forward_max_token_len_per_gpu: int = setting(32768, "tokens of a pass of one worker", at_least=1)
    ulysses_sequence_parallel_size: int = setting(1, "workers that share each sequence", at_least=1)
    name: str = setting("vllm", "engine of a judge")
    prompt_length: int = setting(1024, "tokens of the longest question to a judge", at_least=1)
    response_length: int = setting(0, "tokens of its longest answer")
    dtype: str = setting("bfloat16", "dtype of weights and cache of a judge")
    gpu_memory_utilization: float = setting(0.5, "share of the device's memory for a judge", above=0, at_most=1)
    enforce_eager: bool = setting(True, "a judge captures no CUDA graphs")
    tensor_model_parallel_size: int = setting(2, "workers that share each layer of a judge", at_least=1)
    max_num_batched_tokens: int = setting(8192, "tokens of one pass of a judge")
    max_model_len: int | None = setting(None, "tokens of question and answer", at_least=1)
    max_num_seqs: int = setting(1024, "sequences of one pass of a judge", at_least=1, at_most=2**16)
    enable_chunked_prefill: bool = setting(True, "a question to a judge may take several passes")
    enable_prefix_caching: bool = setting(True, "questions with the same beginning share its cache")
    engine_kwargs: dict[str, Any] = setting({}, "engine arguments by engine name")
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    data_processor_config: RewardModelDataProcessorConfig = field(default_factory=RewardModelDataProcessorConfig)
    nccl_timeout: int = setting(NCCL_TIMEOUT_S, "seconds that a collective may take", at_least=1)
    reward_manager: str = setting("naive", "what turns responses into scores", empty=False)
    launch_reward_fn_async: bool = setting(False, "score while the workers compute log-probs")
    reward_kwargs: dict[str, Any] = setting({}, "further arguments of the reward manager")
    overlong_buffer: OverlongBufferConfig | None = setting(None, "penalty on long responses; null: off")
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    local_sandbox: LocalSandboxConfig = field(default_factory=LocalSandboxConfig)
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)

    def rules(self) -> Iterator[Violation]:
        """Yield keys that another key requires or excludes."""
        if self.strategy == "megatron" and self.megatron is None:
            expected = "needs the keys of Megatron-Core: choose reward_model@reward_model=megatron_reward_model"
            yield Violation("strategy", self.strategy, expected)
        if not self.load_weight and self.strategy != "megatron":
            yield Violation("load_weight", False, "needs strategy=megatron: write true")
        if self.is_generative:
            yield from self._generative_rules()
        elif self.enable and not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "micro_batch_size")
        is_packed = self.model["use_remove_padding"]
        yield from packing_rules(self.ulysses_sequence_parallel_size, is_packed, "reward_model.model")

    @property
    def engine(self) -> Any:
        """The node of the engine that runs a classifier."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

    @property
    def is_classifier(self) -> bool:
        """Whether the model has a head with one label, which scores a whole response."""
        return not self.is_generative

    @property
    def is_generative(self) -> bool:
        """Whether the model writes its score as text."""
        return self.model_type == "generative"

    def _generative_rules(self) -> Iterator[Violation]:
        if self.name not in ROLLOUTS:
            yield Violation("name", self.name, f"must be one of {', '.join(ROLLOUTS)}")
        elif self.name in SERVED_ROLLOUTS and not self.enable_resource_pool:
            expected = "needs separate workers: set reward_model.enable_resource_pool=true, or write hf"
            yield Violation("name", self.name, expected)
        yield from engine_argument_rules(self.name, self.engine_kwargs)
        if self.response_length < 1:
            yield Violation("response_length", self.response_length, "must be 1 or more")
        if self.model["input_tokenizer"] is None:
            expected = "must name the policy's tokenizer: a generative reward model reads text"
            yield Violation("model.input_tokenizer", None, expected)
        if self.data_processor_config["path"] is None:
            expected = "is missing: write the Python file that holds preprocess and postprocess"
            yield Violation("data_processor_config.path", None, expected)

    def as_rollout_config(self) -> RolloutConfig:
        """Return the rollout node of a generative reward model, whose engine loads its own weights."""
        own = ("_target_", "engine_kwargs", "profiler", "nnodes", "n_gpus_per_node")
        shared = {name: self[name] for name in type_hints(RolloutConfig) if name in self and name not in own}
        sampling: Any = self.sampling_config
        return RolloutConfig(
            **shared,
            **{name: sampling[name] for name in ("temperature", "top_k", "top_p", "do_sample")},
            engine_kwargs={"vllm": {}, "sglang": {}, **self.engine_kwargs},
            load_format="auto",
            free_cache_engine=False,
        )
