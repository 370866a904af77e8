"""Keys beyond the YAML files, and replacements of renamed keys."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from verl.workers.config import RewardModelConfig

FREE_FORM = (
    ".mixed_precision",
    ".wrap_policy",
    ".override_config",
    ".override_ddp_config",
    ".override_transformer_config",
    ".override_optimizer_config",
    ".rollout.engine_kwargs",
    ".rollout.server",
    ".ref.model",
    ".reward_kwargs",
    ".reward_model.data_processor_config",
    ".reward_model.engine_kwargs",
    ".reward_model.overlong_buffer",
    ".reward_model.sampling_config",
    ".algorithm.filter_groups",
    ".apply_chat_template_kwargs",
    ".global_tool_config",
    ".ray_init",
)
"""Ends of nodes under which any key may be added: their readers, or their dataclasses, check what is in them."""

OPTIONAL = (
    "actor_rollout_ref.actor.use_rollout_log_probs",
    "actor_rollout_ref.rollout.limit_images",
    "critic.model.custom_chat_template",
    "critic.model.freeze_vision_tower",
    "data.cache_dir",
    "data.gen_batch_size",
    "data.image_key",
    "data.need_tools_kwargs",
    "data.video_key",
    "rollout.repetition_penalty",
    "rollout.seed",
    "trainer.remove_previous_ckpt_in_save",
    "trainer.wandb_proxy",
    *(f"reward_model.{each.name}" for each in fields(RewardModelConfig) if each.name != "_target_"),
)
"""Keys that code reads and no YAML file holds; with or without a leading +. Their dataclasses say what they mean."""

NO_READER = ("trainer.log_freq", "trainer.rl_logging_board_dir", "trainer.tensorboard_dir")
"""Keys of published commands that nothing reads: accepted with a warning."""

RENAMED = {
    "actor_rollout_ref.actor.tis_imp_ratio_cap": "was replaced: write algorithm.rollout_is_threshold=<cap>, "
    "algorithm.rollout_is=true and algorithm.rollout_is_mode=truncate",
    "actor_rollout_ref.actor.profile": "was replaced: write actor_rollout_ref.actor.profiler.enable=true, "
    "global_profiler.tool=torch and global_profiler.steps=[...]",
    "actor_rollout_ref.profiler": "was divided: write actor_rollout_ref.actor.profiler, actor_rollout_ref.ref.profiler",
    "global_profiler.tool_config": "was renamed: write global_profiler.global_tool_config",
    "trainer.controller_nsight_options": "moved: write global_profiler.global_tool_config.nsys."
    "controller_nsight_options",
    "trainer.profile_continuous_steps": "moved: write global_profiler.profile_continuous_steps",
    "trainer.profile_steps": "moved: write global_profiler.steps, and global_profiler.tool",
    "trainer.worker_nsight_options": "moved: write global_profiler.global_tool_config.nsys.worker_nsight_options",
}
"""Older spellings, refused with what replaces them."""


def select(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or ``default`` if the tree has no such key."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def dotted_keys(node: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return every key of a tree, nodes included."""
    keys = []
    for name, value in node.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            keys += dotted_keys(value, f"{prefix}{name}.")
    return keys


def is_under(key: str, nodes: Iterable[str]) -> bool:
    """Whether ``key`` is one of ``nodes`` or below one."""
    return any(key == node or key.startswith(f"{node}.") for node in nodes)


def is_free(key: str, known: Collection[str]) -> bool:
    """Whether ``key`` is a free-form node, or below one, of a node among ``known``."""
    names = key.split(".")
    nodes = [".".join(names[:end]) for end in range(1, len(names) + 1)]
    return any(f".{node}".endswith(FREE_FORM) and node.rpartition(".")[0] in known for node in nodes)


def renamed(key: str) -> str | None:
    """Return the replacement of an older spelling; None if the key is not one."""
    return next((text for old, text in RENAMED.items() if is_under(key, [old])), None)
