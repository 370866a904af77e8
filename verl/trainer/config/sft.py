"""The configuration of a supervised run: one tree from either of the two established ones, its types, its checks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation, as_yaml, matches, omega_conf_to_dataclass, parse_node, read_fields
from verl.trainer.config.keys import dotted_keys, select
from verl.trainer.config.rules.files import RUN_FOLDERS, data_file_rules, folder_rules
from verl.trainer.config.rules.megatron import ASCEND, config_fields, family_rules, optimizer_rules, override_rules
from verl.trainer.config.rules.model import fused_rules, vision_rules
from verl.utils.dataset.config import TRUNCATIONS
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, HFModelConfig, McoreEngineConfig, OptimizerConfig
from verl.workers.config.actor_critic import async_save_rules
from verl.workers.config.model import path_problems, quantized_problem, read_config_json, tokenizer_problems

_LOADING = ("use_shm", "external_lib", "trust_remote_code", "enable_gradient_checkpointing", "use_liger")
_ADAPTERS = ("lora_rank", "lora_alpha", "target_modules")

# From the keys of ``sft_trainer`` to those of ``sft_trainer_engine``; ``data`` and ``trainer`` keep their keys.
MOVED = {
    **{f"model.{name}": f"model.{name}" for name in _LOADING + _ADAPTERS},
    "model.partial_pretrain": "model.path",
    "use_remove_padding": "model.use_remove_padding",
    "model.strategy": "engine.strategy",
    "model.fsdp_config.model_dtype": "engine.model_dtype",
    "model.fsdp_config.wrap_policy": "engine.wrap_policy",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    **{f"optim.{name}": f"optim.{name}" for name in ("lr", "betas", "weight_decay", "clip_grad")},
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "trainer.checkpoint": "checkpoint",
}
TARGETS = {"model": "HFModelConfig", "engine": "FSDPEngineConfig", "optim": "FSDPOptimizerConfig"}


def as_engine_tree(config: DictConfig) -> DictConfig:
    """Return a ``sft_trainer`` tree with the nodes of ``sft_trainer_engine``; one of the latter comes back as it is."""
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


@dataclass(frozen=True)
class DataOptions:
    """The keys of ``data`` that the trainer reads; the data sets read their own."""

    train_files: str | list[str]
    val_files: str | list[str] | None
    train_batch_size: int
    micro_batch_size_per_gpu: int | None
    max_token_len_per_gpu: int | None
    use_dynamic_bsz: bool
    pad_mode: str


@dataclass
class TrainerOptions:
    """Length of the run, records, validation and checkpoints."""

    default_local_dir: str
    default_hdfs_dir: str | None
    project_name: str
    experiment_name: str
    total_epochs: int
    total_training_steps: int | None
    logger: str | list[str]
    record_digests: bool
    report: bool
    seed: int
    save_freq: int | str
    test_freq: int | str
    max_ckpt_to_keep: int | None
    resume_mode: str
    resume_from_path: str | None
    device: str

    prometheus = False
    """Only a run on Ray exports metrics."""


@dataclass(frozen=True)
class SFTConfig:
    """A ``sft_trainer_engine`` tree with types; ``tree`` is the tree itself, which data sets and trackers read."""

    tree: DictConfig
    data: DataOptions
    trainer: TrainerOptions
    model: HFModelConfig
    engine: FSDPEngineConfig | McoreEngineConfig
    checkpoint: CheckpointConfig

    @classmethod
    def parse(cls, config: DictConfig) -> Self:
        """Parse a tree of either entry point.

        Raises: ConfigError when a value has the wrong type or breaks a rule.
        """
        tree = as_engine_tree(config)
        return cls(
            tree=tree,
            data=read_fields(DataOptions, tree.data),
            trainer=read_fields(TrainerOptions, tree.trainer),
            model=omega_conf_to_dataclass(tree.model),
            engine=omega_conf_to_dataclass(tree.engine),
            checkpoint=omega_conf_to_dataclass(tree.checkpoint),
        )

    def optimizer(self, total_steps: int) -> OptimizerConfig:
        """Return the optimizer's node for a run of ``total_steps``, which only the data set tells."""
        node = self.tree.optim.copy()
        OmegaConf.update(node, "total_training_steps", total_steps, force_add=True)
        return omega_conf_to_dataclass(node)


# ---- the checks


def validate_sft_config(config: DictConfig, world_size: int = 1) -> None:
    """Check a tree of either trainer before any process group starts.

    Raises: ConfigError listing everything that is wrong.
    """
    violations = list(_violations(config, world_size))
    if violations:
        raise ConfigError(violations)


def _violations(config: DictConfig, world_size: int) -> Iterator[Violation]:
    raw: Any = OmegaConf.to_container(config, resolve=False)
    yield from (Violation(key, "???", "is missing") for key in dotted_keys(raw) if select(raw, key) == "???")
    if select(raw, "data.chat_template") is not None:
        expected = "must be null: put the template into the tokenizer of the model"
        yield Violation("data.chat_template", raw["data"]["chat_template"], expected)
    tree: Any = OmegaConf.to_container(as_engine_tree(config), resolve=True)
    backwards = {} if "engine" in config else {new: old for old, new in MOVED.items()}
    nodes, wrong = parse_node(tree)
    yield from (violation._replace(key=backwards.get(violation.key, violation.key)) for violation in wrong)
    yield from folder_rules({f"trainer.{name}": select(tree, f"trainer.{name}") for name in RUN_FOLDERS})
    for key in ("data.train_files", "data.val_files"):
        yield from data_file_rules(key, select(tree, key), required=key == "data.train_files")
    path = select(tree, "model.path")
    key = backwards.get("model.path", "model.path")
    if isinstance(path, str):
        problems = [*path_problems(path)] or [*tokenizer_problems(select(tree, "model.tokenizer_path") or path)]
        problems = problems or [*quantized_problem(read_config_json(path))]
        yield from (Violation(key, path, problem) for problem in problems)
        if not problems:
            strategy = ("engine.strategy", select(tree, "engine.strategy"))
            yield from vision_rules(read_config_json(path), strategy, (key, path), world_size)
            if strategy[1] == "megatron":
                node = tree["model"]
                yield from family_rules(node, config_fields(node), "model", "engine=fsdp", key)
    yield from _batch_rules(tree, world_size)
    yield from _choice_rules(tree)
    yield from fused_rules(nodes["model"], "model", select(tree, "trainer.device"))


def parallel_sizes(engine: Mapping[str, Any]) -> dict[str, int]:
    """Return over how many workers each axis of an engine node shares the same rows."""
    axes = ("ulysses_sequence", "tensor_model", "pipeline_model", "context")
    keys = [f"{axis}_parallel_size" for axis in axes]
    return {key: engine[key] for key in keys if key in engine}


def _batch_rules(tree: Mapping[str, Any], world_size: int) -> Iterator[Violation]:
    data = tree["data"]
    axes = parallel_sizes(tree["engine"])
    sizes = ["train_batch_size", "max_length"]
    sizes.append("max_token_len_per_gpu" if data["use_dynamic_bsz"] else "micro_batch_size_per_gpu")
    for name in sizes:
        if not matches(data[name], int) or data[name] < 1:
            yield Violation(f"data.{name}", data[name], "must be an integer of 1 or more")
            return
    if data.get("micro_batch_size") is not None:
        yield Violation("data.micro_batch_size", data["micro_batch_size"], "write data.micro_batch_size_per_gpu")
    sharing = math.prod(axes.values())
    if world_size % sharing:
        product = " x ".join(key for key, size in axes.items() if size > 1)
        yield Violation(f"engine.{product}", sharing, f"must divide the {world_size} workers")
        return
    dp_size = world_size // sharing
    if axes.get("ulysses_sequence_parallel_size", 1) > 1 and not select(tree, "model.use_remove_padding"):
        yield Violation("model.use_remove_padding", False, "must be true with ulysses_sequence_parallel_size above 1")
    if data["train_batch_size"] % dp_size:
        expected = f"must be a multiple of the {dp_size} data-parallel ranks"
        yield Violation("data.train_batch_size", data["train_batch_size"], expected)
    elif not data["use_dynamic_bsz"] and (data["train_batch_size"] // dp_size) % data["micro_batch_size_per_gpu"]:
        expected = f"must divide the {data['train_batch_size'] // dp_size} rows of one rank"
        yield Violation("data.micro_batch_size_per_gpu", data["micro_batch_size_per_gpu"], expected)


CHOICES = {
    "data.truncation": TRUNCATIONS,
    "data.pad_mode": ("no_padding", "right"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.device": ("cuda", "npu", "cpu"),
}
NOT_WITH_MEGATRON = {"model.lora_rank": 0, "model.use_liger": False, "model.enable_activation_offload": False}


def _choice_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    if select(tree, "engine.forward_only", False):
        yield Violation("engine.forward_only", True, "must be false: the model is trained")
    steps = select(tree, "optim.total_training_steps", -1)
    if steps != -1:
        expected = "is set by the trainer: leave it at -1, and write trainer.total_training_steps"
        yield Violation("optim.total_training_steps", steps, expected)
    strategy = select(tree, "engine.strategy")
    if strategy == "megatron":
        if select(tree, "trainer.device") == "npu":
            yield Violation.unsupported("engine.strategy", "megatron", f"{ASCEND}engine=fsdp")
        yield from override_rules(tree["engine"], "engine", "model")
        yield from optimizer_rules(tree["optim"].get("override_optimizer_config") or {}, "optim")
        for key, value in NOT_WITH_MEGATRON.items():
            if select(tree, key, value) != value:
                yield Violation(key, select(tree, key), f"must be {as_yaml(value)} with engine=megatron")
    yield from async_save_rules(select(tree, "checkpoint.async_save", False), strategy)
    for key, names in CHOICES.items():
        if select(tree, key) not in names:
            yield Violation(key, select(tree, key), f"must be one of {', '.join(names)}")
    for key in ("trainer.save_freq", "trainer.test_freq"):
        value = select(tree, key)
        if value != "after_each_epoch" and not matches(value, int):
            yield Violation(key, value, "must be an integer, or after_each_epoch")
    if select(tree, "trainer.resume_mode") == "resume_path" and not select(tree, "trainer.resume_from_path"):
        yield Violation("trainer.resume_from_path", None, "must name a global_step_<N> folder")
