"""The configuration of a supervised run: its types and checks, for the trees of both supervised trainers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl.base_config import (
    MOST_SECONDS,
    MOST_SEED,
    BaseConfig,
    ConfigError,
    NodeReader,
    Violation,
    as_yaml,
    matches,
    setting,
)
from verl.trainer.config.keys import dotted_keys, select, tree_of
from verl.trainer.config.rules import remote_code
from verl.trainer.config.rules.files import (
    RUN_FOLDERS,
    RUN_NAMES,
    data_file_rules,
    folder_rules,
    name_rules,
    resume_rules,
)
from verl.trainer.config.rules.megatron import (
    ASCEND,
    bridge_rules,
    bridged_architecture,
    config_fields,
    family_rules,
    mcore_sharing_rules,
    optimizer_rules,
    override_rules,
)
from verl.trainer.config.rules.model import fused_rules, loss_rules, packing_rules, tied_adapter_rules, vision_rules
from verl.trainer.config.run_config import RESUME_MODES, tracker_rules
from verl.utils.dataset.config import TRUNCATIONS
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, HFModelConfig, McoreEngineConfig, OptimizerConfig
from verl.workers.config.actor_critic import async_save_rules
from verl.workers.config.engine import DEVICES
from verl.workers.config.model import path_problems, quantized_problem, read_config_json
from verl.workers.config.overrides import overridden, override_problems
from verl.workers.config.tokenizer_files import tokenizer_problems, vocabulary_difference

EACH_EPOCH = "after_each_epoch"
_PERIOD = f"write a number of steps, or {EACH_EPOCH}"

_LOADING = ("use_shm", "external_lib", "trust_remote_code", "enable_gradient_checkpointing", "use_liger")
_OPTIMIZER = ("lr", "betas", "weight_decay", "clip_grad", "use_checkpoint_opt_param_scheduler")
_ADAPTERS = ("lora_rank", "lora_alpha", "target_modules")

# From the keys of ``sft_trainer`` to those of ``sft_trainer_engine``; ``data`` and ``trainer`` keep their keys.
MOVED = {
    **{f"model.{name}": f"model.{name}" for name in _LOADING + _ADAPTERS},
    "model.partial_pretrain": "model.path",
    "use_remove_padding": "model.use_remove_padding",
    "use_prefix_sharing": "model.use_prefix_sharing",
    "model.strategy": "engine.strategy",
    "model.fsdp_config.model_dtype": "engine.model_dtype",
    "model.fsdp_config.wrap_policy": "engine.wrap_policy",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    **{f"optim.{name}": f"optim.{name}" for name in _OPTIMIZER},
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "trainer.checkpoint": "checkpoint",
}
TARGETS = {"model": "HFModelConfig", "engine": "FSDPEngineConfig", "optim": "FSDPOptimizerConfig"}


def as_engine_tree(config: DictConfig) -> DictConfig:
    """Convert a ``sft_trainer`` tree to the nodes of ``sft_trainer_engine``; return a tree of the latter unchanged."""
    if "engine" in config:
        return config
    tree: Any = OmegaConf.to_container(config, resolve=True)
    moved: DictConfig = OmegaConf.create({"data": tree["data"], "trainer": tree["trainer"]})
    for name, cls in TARGETS.items():
        OmegaConf.update(moved, f"{name}._target_", f"verl.workers.config.{cls}", force_add=True)
    for old, new in MOVED.items():
        OmegaConf.update(moved, new, select(tree, old), force_add=True)
    sharding = tree["model"]["fsdp_config"]
    moved.engine.offload_policy = bool(sharding["cpu_offload"] and sharding["offload_params"])
    moved.engine.optimizer_offload = bool(sharding["cpu_offload"] and not sharding["offload_params"])
    moved.checkpoint._target_ = "verl.trainer.config.CheckpointConfig"
    moved.data.update({"use_dynamic_bsz": False, "max_token_len_per_gpu": None, "pad_mode": "right"})
    return moved


@dataclass
class DataOptions(BaseConfig):
    """The keys of ``data`` that the trainer reads; the data sets read their own."""

    train_files: str | list[str] = setting("~/data/gsm8k/train.parquet", "training rows: a file or a list")
    val_files: str | list[str] | None = setting(None, "validation rows: a file or a list")
    train_max_samples: int = setting(-1, "first rows of the training files that are read; -1: all", at_least=-1)
    val_max_samples: int = setting(-1, "first rows of the validation files that are read; -1: all", at_least=-1)
    train_batch_size: int = setting(256, "rows of one optimizer step", at_least=1)
    micro_batch_size: int | None = setting(None, "deprecated: micro_batch_size_per_gpu")
    micro_batch_size_per_gpu: int | None = setting(4, "rows of a pass of one worker")
    use_dynamic_bsz: bool = setting(True, "fill a pass up to a number of tokens")
    max_token_len_per_gpu: int | None = setting(8192, "tokens of a pass of one worker, with use_dynamic_bsz")
    max_length: int = setting(1024, "tokens of the longest row", at_least=1)
    truncation: str = setting("error", "what happens to longer rows", one_of=TRUNCATIONS)
    pad_mode: str = setting("no_padding", "where rows are padded", one_of=("no_padding", "right"))
    chat_template: str | None = setting(None, "kept for established commands")

    def rules(self) -> Iterator[Violation]:
        """Yield a missing size of passes, and keys that must be null."""
        size = "max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"
        if not matches(self[size], int) or self[size] < 1:
            yield Violation(size, self[size], "must be an integer of 1 or more")
        if self.micro_batch_size is not None:
            yield Violation("micro_batch_size", self.micro_batch_size, "write data.micro_batch_size_per_gpu")
        if self.chat_template is not None:
            expected = "must be null: put the template into the tokenizer of the model"
            yield Violation("chat_template", self.chat_template, expected)


@dataclass
class TrainerOptions(BaseConfig):
    """Length of the run, records, validation and checkpoints."""

    prometheus = False
    """Only a run on Ray exports metrics."""

    default_local_dir: str = setting("checkpoints/gsm8k-sft/test", "folder of the run")
    default_hdfs_dir: str | None = setting(None, "remote folder that checkpoints are copied to")
    project_name: str = setting("gsm8k-sft", "project in trackers and in the checkpoint folder")
    experiment_name: str = setting("test", "run in trackers and in the checkpoint folder")
    total_epochs: int = setting(4, "passes over the training set", at_least=1)
    total_training_steps: int | None = setting(None, "training steps; null: epochs x batches per epoch", at_least=1)
    logger: str | list[str] = setting(["console"], "trackers of metrics")
    record_digests: bool = setting(True, "keep digests of batch, weights and random state")
    report: bool = setting(True, "write report.html at the end")
    seed: int = setting(1, "seed of the order of the data", at_most=MOST_SEED)
    save_freq: int | str | Literal[False] = setting(-1, "steps between checkpoints; 0 or less: none", hint=_PERIOD)
    test_freq: int | str | Literal[False] = setting(-1, "steps between validations; 0 or less: none", hint=_PERIOD)
    max_ckpt_to_keep: int | None = setting(None, "checkpoints kept; null: all", at_least=1)
    save_on_sigterm_s: float | None = setting(
        None, "seconds after SIGTERM to save the last full step", above=0, at_most=MOST_SECONDS
    )
    resume_mode: str = setting("auto", "where to continue", one_of=RESUME_MODES)
    resume_from_path: str | None = setting(None, "global_step_<N> folder, with resume_mode=resume_path")
    trusted_classes: list[str] = setting([], "classes of yours that the loader state of a checkpoint may hold")
    device: str = setting("cuda", "device of the workers", one_of=DEVICES)

    def rules(self) -> Iterator[Violation]:
        """Yield unknown trackers and periods."""
        yield from tracker_rules(self.logger)
        for key in ("save_freq", "test_freq"):
            if isinstance(self[key], str) and self[key] != EACH_EPOCH:
                yield Violation(key, self[key], _PERIOD)


@dataclass
class SFTConfig(BaseConfig):
    """A ``sft_trainer_engine`` tree with types."""

    data: DataOptions = field(default_factory=DataOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    model: HFModelConfig = field(default_factory=HFModelConfig)
    engine: FSDPEngineConfig | McoreEngineConfig = field(default_factory=FSDPEngineConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


# ---- the checks


def parse_sft_config(config: DictConfig, world_size: int = 1) -> SFTConfig:
    """Parse and check a tree of either trainer before any process group starts; imports no ``model.external_lib``.

    Raises: ConfigError listing everything that is wrong.
    """
    run, violations = examined_sft_config(config, world_size)
    if violations:
        raise ConfigError(violations)
    return run


def examined_sft_config(
    config: DictConfig, world_size: int = 1, stops_at_types: bool = False
) -> tuple[SFTConfig, list[Violation]]:
    """Parse and check a tree like ``parse_sft_config``, and return it with all violations.

    Raises: with ``stops_at_types`` ConfigError if it has values of the wrong type, with everything that is wrong in the
        tree.
    """
    tree = tree_of(as_engine_tree(config))
    reader = NodeReader()
    run: SFTConfig = reader.build(tree, "", SFTConfig)
    violations = list(_violations(config, tree, run, reader.violations, world_size))
    if stops_at_types and (reader.mistyped or reader.unknown):
        raise ConfigError(violations)
    return run, violations


def _violations(
    config: DictConfig, tree: Mapping[str, Any], run: SFTConfig, wrong: list[Violation], world_size: int
) -> Iterator[Violation]:
    """Yield the violations of ``config``; ``run`` is its parsed ``tree``, ``wrong`` holds the violations of parsing."""
    raw = tree_of(config, resolve=False)
    missing = [Violation(key, "???", "is missing") for key in dotted_keys(raw) if select(raw, key) == "???"]
    yield from missing
    backwards = {} if "engine" in config else {new: old for old, new in MOVED.items()}
    yield from (violation._replace(key=backwards.get(violation.key, violation.key)) for violation in wrong)
    yield from name_rules({f"trainer.{name}": select(tree, f"trainer.{name}") for name in RUN_NAMES})
    yield from folder_rules({f"trainer.{name}": select(tree, f"trainer.{name}") for name in RUN_FOLDERS})
    resumed = run.trainer.resume_from_path
    mode = run.trainer.resume_mode
    # Auto resumes from a given path.
    yield from resume_rules("resume_path" if mode == "auto" and resumed else mode, resumed)
    for key in ("data.train_files", "data.val_files"):
        yield from data_file_rules(key, select(tree, key), required=key == "data.train_files")
    path = select(tree, "model.path")
    key = backwards.get("model.path", "model.path")
    if isinstance(path, str):
        tokenizer = str(select(tree, "model.tokenizer_path") or path)
        problems = [*path_problems(path)] or [*tokenizer_problems(tokenizer, read_config_json(path))]
        if difference := vocabulary_difference(tokenizer, path, may_lack=True):
            problems.append(f"model.tokenizer_path is not its tokenizer: {difference}: name the model's tokenizer")
        problems = problems or [*quantized_problem(read_config_json(path))]
        yield from (Violation(key, path, problem) for problem in problems)
        if not problems:
            hf_config = read_config_json(path)
            changes = run.model.override_config
            for problem in override_problems(hf_config, changes):
                yield Violation("model.override_config", as_yaml(changes), problem)
            trust_key = backwards.get("model.trust_remote_code", "model.trust_remote_code")
            yield from remote_code.trust_rules(hf_config, path, trust_key, run.model.trust_remote_code)
            yield from remote_code.tokenizer_trust_rules(tokenizer, trust_key, run.model.trust_remote_code)
            yield from remote_code.head_option_rules(
                hf_config, "model", run.model.use_fused_kernels, run.model.use_liger
            )
            custom = select(tree, "data.custom_cls.path")
            yield from remote_code.data_class_rules(hf_config, custom, "the file of a class that does")
            yield from tied_adapter_rules(run.model, "model", hf_config)
            strategy = "megatron" if isinstance(run.engine, McoreEngineConfig) else "fsdp"
            yield from loss_rules(tree["model"], "model", hf_config, strategy)
            if not isinstance(run.engine, McoreEngineConfig):
                yield from vision_rules(hf_config, (key, path), world_size)
                yield from (
                    violation._replace(key=backwards.get(violation.key, violation.key))
                    for violation in packing_rules(tree["model"], "model", hf_config, run.trainer.device)
                )
            else:
                node = tree["model"]
                shape = config_fields(node)
                if run.model.use_prefix_sharing:
                    fields = overridden(hf_config, run.model.override_config)
                    yield from mcore_sharing_rules("model", fields, run.engine, run.trainer.device)
                if bridged := bridged_architecture(node, shape, run.engine):
                    yield from bridge_rules(bridged, "engine", run.trainer.device, "engine=fsdp")
                else:
                    yield from family_rules(node, shape, "model", "engine=fsdp", key)
    if not any("_size" in violation.key for violation in missing + wrong):
        yield from _batch_rules(run, world_size)
    yield from _choice_rules(run, tree)
    yield from fused_rules(run.model, "model", run.trainer.device)


def parallel_sizes(engine: Mapping[str, int]) -> dict[str, int]:
    """Return over how many workers each axis of an engine node shares the same rows."""
    axes = ("ulysses_sequence", "tensor_model", "pipeline_model", "context")
    keys = [f"{axis}_parallel_size" for axis in axes]
    return {key: engine[key] for key in keys if key in engine}


def _batch_rules(run: SFTConfig, world_size: int) -> Iterator[Violation]:
    data = run.data
    axes = parallel_sizes(run.engine)
    sharing = math.prod(axes.values())
    if world_size % sharing:
        product = " x ".join(key for key, size in axes.items() if size > 1)
        yield Violation(f"engine.{product}", sharing, f"must divide the {world_size} workers")
        return
    dp_size = world_size // sharing
    if axes.get("ulysses_sequence_parallel_size", 1) > 1 and not run.model.use_remove_padding:
        yield Violation("model.use_remove_padding", False, "must be true with ulysses_sequence_parallel_size above 1")
    rows, excess = divmod(data.train_batch_size, dp_size)
    if excess:
        expected = f"must be a multiple of the {dp_size} data-parallel ranks"
        yield Violation("data.train_batch_size", data.train_batch_size, expected)
    elif not data.use_dynamic_bsz and data.micro_batch_size_per_gpu and rows % data.micro_batch_size_per_gpu:
        expected = f"must divide the {rows} rows of one rank"
        yield Violation("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu, expected)


NOT_WITH_MEGATRON = {"lora_rank": 0, "use_liger": False, "enable_activation_offload": False}


def _choice_rules(run: SFTConfig, tree: Mapping[str, Any]) -> Iterator[Violation]:
    if run.engine.forward_only:
        yield Violation("engine.forward_only", True, "must be false: the model is trained")
    steps = run.optim.total_training_steps
    if steps != -1:
        expected = "is set by the trainer: leave it at -1, and write trainer.total_training_steps"
        yield Violation("optim.total_training_steps", steps, expected)
    strategy = run.engine.strategy
    if strategy == "megatron":
        if run.trainer.device == "npu":
            yield Violation.unsupported("engine.strategy", "megatron", f"{ASCEND}engine=fsdp")
        yield from override_rules(tree["engine"], "engine", "model")
        yield from optimizer_rules(tree["optim"].get("override_optimizer_config") or {}, "optim")
        for key, value in NOT_WITH_MEGATRON.items():
            if run.model[key] != value:
                yield Violation(f"model.{key}", run.model[key], f"must be {as_yaml(value)} with engine=megatron")
    yield from async_save_rules(run.checkpoint.async_save, strategy)
