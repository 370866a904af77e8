"""The configuration of generation on servers: a tree of the main trainer, read as a tree of offline generation."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.rules.no_effect import free_entries
from verl.trainer.config.rules.profiler import tool_rules
from verl.trainer.config.run_config import parse_tree

logger = logging.getLogger(__name__)

_ROLE = "actor_rollout_ref"
_KEYS = {
    "data.path": "data.train_files",
    "data.n_samples": f"{_ROLE}.rollout.n",
    "data.batch_size": "data.train_batch_size",
}
"""Keys of ``generation`` that have another name here."""
_UNREAD = (f"{_ROLE}.actor", f"{_ROLE}.ref", "critic", "reward_model", "custom_reward_function")
"""Nodes of the trainer that generation does not read."""


def parse_generation_server(config: DictConfig) -> GenerationConfig:
    """Parse and check a ``generation_server`` tree; ``rollout.mode`` may have any value, since servers generate.

    Raises: ConfigError listing everything that is wrong, by the keys of this tree.
    """
    tree: Any = OmegaConf.to_container(config, resolve=True)
    files = tree["data"]["train_files"]
    paths = [files] if isinstance(files, str) else list(files or [])
    if len(paths) != 1:
        raise ConfigError([Violation("data.train_files", files, "must be one parquet file: call the command for each")])
    rollout = tree[_ROLE]["rollout"]
    if rollout.get("ignore_eos"):
        key = f"{_ROLE}.rollout.ignore_eos"
        raise ConfigError([Violation(key, True, "must be false: the endpoint ends a response at its end token")])
    if tree["ray_kwargs"].pop("fork_workers"):
        raise ConfigError([Violation("ray_kwargs.fork_workers", True, "must be false: only a training run has forks")])
    if rollout["load_format"] == "dummy":  # the default of a trainer, which sends its weights
        rollout["load_format"] = "auto"
    run, reader = parse_tree(tree)
    profiling = [each for each in reader.violations if each.key.startswith("global_profiler")]
    if wrong := [*tool_rules(tree), *profiling]:
        raise ConfigError(wrong)
    try:
        parsed = GenerationConfig.parse(OmegaConf.create(_as_generation(tree, paths[0])))
    except ConfigError as error:
        raise ConfigError([_renamed(violation) for violation in error.violations]) from error
    unread = [*free_entries(run, tree, dict.fromkeys(_UNREAD, "this command only generates"))]
    if unread:
        logger.warning("without effect in this run: %s", "; ".join(map(str, unread)))
    role = tree[_ROLE] | {"hybrid_engine": False}  # servers that die are replaced
    return replace(parsed, worker=OmegaConf.create({_ROLE: role, "rollout": role["rollout"]}))


def _as_generation(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert a ``generation_server`` tree to a ``generation`` tree."""
    data = tree["data"]
    trainer = tree["trainer"]
    role = tree[_ROLE]
    return {
        "data": {
            "path": path,
            "prompt_key": data["prompt_key"],
            "image_key": data["image_key"],
            "video_key": data["video_key"],
            "apply_chat_template_kwargs": data["apply_chat_template_kwargs"] or {},
            "n_samples": role["rollout"]["n"],
            "output_path": data["output_path"],
            "batch_size": data["train_batch_size"],
        },
        "trainer": {name: trainer[name] for name in ("nnodes", "n_gpus_per_node", "device")},
        "rollout": role["rollout"] | {"mode": "sync"},
        "model": role["model"],
        "actor": {},
        "ray_kwargs": tree["ray_kwargs"],
    }


def _renamed(violation: Violation) -> Violation:
    def renamed(key: str) -> str:
        first = key.partition(".")[0]
        return _KEYS.get(key) or (f"{_ROLE}.{key}" if first in ("rollout", "model") else key)

    return violation._replace(key=renamed(violation.key), others=tuple(map(renamed, violation.others)))
