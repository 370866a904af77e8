"""Which dotted keys exist beyond the YAML files, and which key a wrong one was meant to be."""

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

FREE_FORM = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy",
    "actor_rollout_ref.ref.model",
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.ref.megatron.override_ddp_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.rollout.server",
    "algorithm.filter_groups",
    "critic.megatron.override_ddp_config",
    "critic.megatron.override_transformer_config",
    "critic.model.fsdp_config.mixed_precision",
    "critic.model.fsdp_config.wrap_policy",
    "critic.model.override_config",
    "critic.optim.override_optimizer_config",
    "custom_reward_function.reward_kwargs",
    "data.apply_chat_template_kwargs",
    "engine.mixed_precision",
    "engine.override_ddp_config",
    "engine.override_transformer_config",
    "engine.wrap_policy",
    "global_profiler.global_tool_config",
    "model.fsdp_config.wrap_policy",
    "model.override_config",
    "optim.override_optimizer_config",
    "ray_kwargs.ray_init",
    "reward_model.data_processor_config",
    "reward_model.engine_kwargs",
    "reward_model.megatron.override_ddp_config",
    "reward_model.megatron.override_transformer_config",
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs",
    "reward_model.sampling_config",
    "rollout.engine_kwargs",
)
"""Nodes under which any key may be added: their readers, or their dataclasses, check what is in them."""

OPTIONAL = {
    "actor_rollout_ref.actor.use_rollout_log_probs": "use the old log-probs of the batch even where on-policy",
    "actor_rollout_ref.rollout.limit_images": "images per prompt",
    "critic.model.custom_chat_template": "Jinja text instead of the chat template",
    "critic.model.freeze_vision_tower": "stop gradients in the vision tower",
    "data.cache_dir": "where downloaded files go",
    "data.gen_batch_size": "prompts drawn per loader step; train_batch_size where it is not given",
    "data.need_tools_kwargs": "default for rows without extra_info.need_tools_kwargs",
    **{
        f"reward_model.{name}": "of a generative reward model: as in actor_rollout_ref.rollout"
        for name in (
            *("name", "prompt_length", "response_length", "dtype", "gpu_memory_utilization", "enforce_eager"),
            *("tensor_model_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
            *("enable_chunked_prefill", "enable_prefix_caching"),
        )
    },
    "reward_model.model_type": "discriminative, a classifier, or generative, a model that writes a judgement",
    "reward_model.truncation": "what of a chat longer than reward_model.max_length is cut: right, left, middle, error",
    "rollout.repetition_penalty": "penalty on repeated tokens",
    "rollout.seed": "seed of the engine",
    "trainer.remove_previous_ckpt_in_save": "deprecated: keep one checkpoint",
    "trainer.wandb_proxy": "HTTPS proxy for wandb",
}
"""Keys that code reads and no YAML file holds; with or without a leading +."""

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


def renamed(key: str) -> str | None:
    """Return what replaces an older spelling, or None for a key that is none."""
    return next((text for old, text in RENAMED.items() if is_under(key, [old])), None)


def nearest(key: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the keys most like ``key``: by the whole, and by the last name more than by the path."""
    last = key.rsplit(".", 1)[-1]

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, key, other).ratio()
        return whole + SequenceMatcher(None, last, other.rsplit(".", 1)[-1]).ratio()

    ranked = sorted(known, key=likeness, reverse=True)[:count]
    best = likeness(ranked[0]) if ranked else 0.0
    return [other for other in ranked if likeness(other) > max(0.9, 0.8 * best)]


def unknown_key_text(key: str, known: Iterable[str]) -> str:
    """Return what to say of a key that does not exist."""
    similar = nearest(key, known)
    return f"there is no such key; the nearest: {', '.join(similar)}" if similar else "there is no such key"
