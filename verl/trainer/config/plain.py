"""Types and ranges of the nodes that are plain mappings: data, trainer, reference, reward, Ray."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.refusals import select

Check = tuple[Callable[[Any], bool], str]


def _integer(minimum: int | None = None, null: bool = False) -> Check:
    def fits(value: Any) -> bool:
        if value is None:
            return null
        return isinstance(value, int) and not isinstance(value, bool) and (minimum is None or value >= minimum)

    bound = "" if minimum is None else f" of {minimum} or more"
    return fits, f"must be an integer{bound}{', or null' if null else ''}"


def _choice(*names: Any) -> Check:
    return lambda value: value in names, f"must be one of {', '.join(map(str, names))}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_null_or_url(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.match(r"https?://[^/\s]+", value) is not None)


def _is_ratio(value: Any) -> bool:
    return _is_finite(value) and 0 <= value <= 1


_COUNT, _SIZE, _NULL_SIZE = _integer(0), _integer(1), _integer(1, null=True)
_BOOL: Check = (lambda value: isinstance(value, bool), "must be true or false")
_TEXT: Check = (lambda value: isinstance(value, str) and bool(value), "must be a string")
_NULL_TEXT: Check = (lambda value: value is None or isinstance(value, str), "must be a string, or null")
_MAPPING: Check = (lambda value: isinstance(value, Mapping), "must be a mapping")
_SECONDS: Check = (_is_positive, "must be a number of seconds above 0")

CHECKS: dict[str, dict[str, Check]] = {
    "data": {
        **dict.fromkeys(("prompt_key", "reward_fn_key", "image_key", "video_key"), _TEXT),
        **dict.fromkeys(("max_prompt_length", "max_response_length", "train_batch_size"), _SIZE),
        **dict.fromkeys(("filter_overlong_prompts_workers",), _SIZE),
        **dict.fromkeys(("val_batch_size", "gen_batch_size"), _NULL_SIZE),
        **dict.fromkeys(("return_raw_chat", "return_full_prompt", "return_multi_modal_inputs", "shuffle"), _BOOL),
        **dict.fromkeys(("validation_shuffle", "filter_overlong_prompts", "trust_remote_code", "use_shm"), _BOOL),
        "dataloader_num_workers": _COUNT,
        "seed": _integer(null=True),
        "truncation": _choice("error", "left", "right", "middle"),
        "apply_chat_template_kwargs": _MAPPING,
    },
    "trainer": {
        **dict.fromkeys(("total_epochs", "nnodes", "n_gpus_per_node"), _SIZE),
        **dict.fromkeys(("total_training_steps", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"), _NULL_SIZE),
        **dict.fromkeys(("save_freq", "test_freq"), _integer()),
        **dict.fromkeys(("log_val_generations", "esi_redundant_time", "critic_warmup", "record_samples"), _COUNT),
        **dict.fromkeys(("record_digests", "report", "prometheus"), _BOOL),
        **dict.fromkeys(("balance_batch", "val_before_train", "val_only", "del_local_ckpt_after_load"), _BOOL),
        **dict.fromkeys(("project_name", "experiment_name", "default_local_dir"), _TEXT),
        **dict.fromkeys(("rollout_data_dir", "validation_data_dir", "default_hdfs_dir", "wandb_proxy"), _NULL_TEXT),
        **dict.fromkeys(("worker_call_timeout_s", "ray_wait_register_center_timeout"), _SECONDS),
        "seed": _integer(),
        "resume_mode": _choice("auto", "disable", "resume_path"),
        "device": _choice("cuda", "cpu", "npu"),
        "use_legacy_worker_impl": _choice("auto", "enable", "disable"),
        "live_view": _choice("auto", "table", "bar", "lines", "off"),
    },
    "actor_rollout_ref": {
        "hybrid_engine": (lambda value: value is True, "must be true: actor and rollout share their devices"),
        "nccl_timeout": _SECONDS,
    },
    "actor_rollout_ref.ref": {
        **dict.fromkeys(("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"), _NULL_SIZE),
        **dict.fromkeys(("ulysses_sequence_parallel_size", "log_prob_max_token_len_per_gpu"), _SIZE),
        **dict.fromkeys(("log_prob_use_dynamic_bsz", "use_torch_compile"), _BOOL),
        "strategy": _choice("fsdp", "fsdp2", "megatron"),
        "model": (
            lambda value: value is None or isinstance(value, Mapping),
            "must be null or a mapping: name a model by actor_rollout_ref.ref.model.path",
        ),
    },
    "reward_model": {
        "reward_kwargs": _MAPPING,
        "reward_manager": _TEXT,
        **dict.fromkeys(("enable", "enable_resource_pool", "launch_reward_fn_async"), _BOOL),
    },
    "reward_model.scoring": {
        **dict.fromkeys(("timeout_s", "batch_timeout_s"), _SECONDS),
        "failure_score": (_is_finite, "must be a finite number"),
        "max_failed_ratio": (_is_ratio, "must be a number from 0 to 1"),
    },
    "reward_model.sandbox_fusion": {
        "url": (_is_null_or_url, "must be null or an address such as http://host:8080/run_code"),
        **dict.fromkeys(("max_concurrent", "memory_limit_mb"), _SIZE),
    },
    "reward_model.local_sandbox": {"timeout_s": _SECONDS, "allow_unisolated": _BOOL},
    "ray_kwargs": {"timeline_json_file": _NULL_TEXT},
    "custom_reward_function": {"path": _NULL_TEXT, "name": _TEXT, "reward_kwargs": _MAPPING},
}

TRACKERS = (
    *("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "tracking"),
    *("vemlp_wandb", "clearml", "trackio"),
)


def plain_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield values of the plain nodes that have the wrong type or range."""
    for node, checks in CHECKS.items():
        for name, (fits, expected) in checks.items():
            value = select(tree, f"{node}.{name}", _ABSENT)
            if value is not _ABSENT and value != "???" and not fits(value):
                yield Violation(f"{node}.{name}", value, expected)
    yield from _trainer_rules(tree)
    yield from _pair_rules(tree)


_ABSENT = object()


def _trainer_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    loggers = select(tree, "trainer.logger")
    names = [loggers] if isinstance(loggers, str) else loggers
    if not isinstance(names, list) or any(name not in TRACKERS for name in names):
        yield Violation("trainer.logger", loggers, f"must be a list of trackers out of {', '.join(TRACKERS)}")
    path = select(tree, "trainer.resume_from_path")
    if select(tree, "trainer.resume_mode") == "resume_path":
        if not isinstance(path, str) or "global_step_" not in path:
            expected = "must name a global_step_<N> folder with trainer.resume_mode=resume_path"
            yield Violation("trainer.resume_from_path", path, expected)
        elif not os.path.isdir(os.path.expanduser(path)):
            yield Violation("trainer.resume_from_path", path, "no such folder: write a checkpoint's global_step_<N>")
    validates = [name for name in ("val_before_train", "val_only") if select(tree, f"trainer.{name}")]
    if _is_positive(select(tree, "trainer.test_freq")):
        validates.append("test_freq")
    if select(tree, "data.val_files", _ABSENT) is None and validates:
        asked = ", ".join(f"trainer.{name}" for name in validates)
        expected = f"{asked} ask{'s' if len(validates) == 1 else ''} for validation: name a file, or write "
        yield Violation("data.val_files", None, f"{expected}trainer.val_before_train=false and trainer.test_freq=-1")


def _pair_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield classes of the user's own that are given by half, and samplers that loader workers would defeat."""
    for node, path_key, name_key in (
        ("data.custom_cls", "path", "name"),
        ("data.sampler", "class_path", "class_name"),
        ("data.datagen", "path", "name"),
    ):
        path, name = select(tree, f"{node}.{path_key}"), select(tree, f"{node}.{name_key}")
        if path is not None and name is None:
            yield Violation(f"{node}.{name_key}", None, f"is missing: name the class in {node}.{path_key}={path}")
        if path is None and name is not None:
            yield Violation(f"{node}.{path_key}", None, f"is missing: write the file that holds {name}")
    workers = select(tree, "data.dataloader_num_workers", 0)
    if select(tree, "data.sampler.class_path") is not None and workers != 0:
        yield Violation("data.dataloader_num_workers", workers, "must be 0 with data.sampler.class_path")
