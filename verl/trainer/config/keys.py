"""Keys of a tree that no YAML file of verl has, and keys of other versions of verl."""

import pkgutil
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import Violation
from verl.trainer.config.other_versions import row_of
from verl.utils import envs
from verl.utils.json_types import Json
from verl.utils.vision.limits import MediaConfig
from verl.workers.config import RewardModelConfig
from verl.workers.rewards.signature import SCORER_CALLS

T = TypeVar("T")


class Absent(Enum):
    """The mark of a key that a tree does not have."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

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

_FSDP_ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")

OPTIONAL = (
    "actor_rollout_ref.actor.use_rollout_log_probs",
    *(f"actor_rollout_ref.{role}.entropy_from_logits_chunk_size" for role in ("actor", "ref")),
    *(f"{node}.full_determinism" for node in _FSDP_ENGINES),
    "actor_rollout_ref.rollout.limit_images",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.rollout.skip_action",
    "actor_rollout_ref.rollout.skip_steps",
    "actor_rollout_ref.rollout.trace.experiment_name",
    "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker",
    "actor_rollout_ref.rollout.trace.project_name",
    "critic.model.custom_chat_template",
    "critic.model.freeze_vision_tower",
    "data.cache_dir",
    "data.gen_batch_size",
    "data.image_key",
    "data.image_patch_size",
    "data.need_tools_kwargs",
    "data.train_max_samples",
    "data.val_max_samples",
    "data.video_key",
    "rollout.repetition_penalty",
    "rollout.seed",
    "trainer.remove_previous_ckpt_in_save",
    "trainer.wandb_proxy",
    *(f"reward_model.{each.name}" for each in fields(RewardModelConfig) if each.name != "_target_"),
)
"""Keys that code reads and no YAML file holds; with or without a leading +. Their dataclasses say what they mean."""

_MEDIA = tuple(f"data.media.{each.name}" for each in fields(MediaConfig))
_ROWS = tuple(
    f"data.{name}" for name in ("train_max_samples", "val_max_samples", "image_patch_size", "ignore_input_ids_mismatch")
)
_OPTIONAL_IN_SFT = ("data.image_key", "data.video_key", "data.media", *_MEDIA, *_ROWS, "engine.full_determinism")

NO_READER = ("trainer.log_freq", "trainer.rl_logging_board_dir", "trainer.tensorboard_dir")
"""Keys of published commands that nothing reads: accepted with a warning."""


def tree_of(config: DictConfig, resolve: bool = True) -> dict[str, Json]:
    """Return a configuration as plain values; a missing one is ``???``."""
    tree: Any = OmegaConf.to_container(config, resolve=resolve)
    return tree


def select(tree: Mapping[str, Json], key: str, default: T | None = None) -> Json | T:
    """Return the value at a dotted key, or ``default`` if the tree has no such key."""
    node: Json | T = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def dotted_keys(node: Mapping[str, Json], prefix: str = "") -> list[str]:
    """Return every key of a tree, nodes included."""
    keys = []
    for name, value in node.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            keys += dotted_keys(value, f"{prefix}{name}.")
    return keys


def without(tree: Mapping[str, Json], keys: Collection[str], prefix: str = "") -> dict[str, Json]:
    """Return a tree without some of its dotted keys."""
    kept = {name: value for name, value in tree.items() if f"{prefix}{name}" not in keys}
    return {
        name: without(value, keys, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in kept.items()
    }


def is_under(key: str, nodes: Iterable[str]) -> bool:
    """Whether ``key`` is one of ``nodes`` or below one."""
    return any(key == node or key.startswith(f"{node}.") for node in nodes)


def is_free(key: str, known: Collection[str]) -> bool:
    """Whether ``key`` is a free-form node, or below one, of a node among ``known``."""
    names = key.split(".")
    nodes = [".".join(names[:end]) for end in range(1, len(names) + 1)]
    return any(f".{node}".endswith(FREE_FORM) and node.rpartition(".")[0] in known for node in nodes)


def free_nodes(tree: Mapping[str, Json]) -> list[str]:
    """Return the highest nodes of a tree that take any key."""
    keys = dotted_keys(tree)
    free = [key for key in keys if is_free(key, keys)]
    return [key for key in free if key.rpartition(".")[0] not in free]


def optional_keys(known: Collection[str]) -> tuple[str, ...]:
    """Return the keys of OPTIONAL that a command reads; ``known`` are the keys of the command."""
    if "actor_rollout_ref" in known:
        return tuple(key for key in OPTIONAL if not key.startswith("rollout."))
    if "rollout" in known:
        return tuple(key for key in OPTIONAL if key.startswith("rollout."))
    return _OPTIONAL_IN_SFT if "data.train_files" in known else ()


_ANY_NODE = (
    *(f"{role}.external_lib" for role in ("model", "actor_rollout_ref.model", "critic.model", "reward_model.model")),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.agent.custom_async_server.path",
)
_DATA = ("data.custom_cls.path", "data.sampler.class_path", "data.datagen.path")
_MANAGER = "reward_model.reward_manager"
USER_CODE = (*_ANY_NODE, *_DATA, _MANAGER)
"""Keys that name code of the user which reads the configuration: all of it, its node ``data``, the reward model's."""


def nodes_of_user_code(config: DictConfig) -> tuple[str, ...]:
    """Return the nodes in which code of the user may read keys that we do not know; an empty name is the whole tree."""

    def value(key: str) -> Json:
        with suppress(OmegaConfBaseException):  # the checks of values name what cannot be resolved
            return OmegaConf.select(config, key)
        return None

    if envs.read("VERL_USE_EXTERNAL_MODULES") or any(map(value, _ANY_NODE)):
        return ("",)
    nodes = ["data"] if any(map(value, _DATA)) else []
    manager = value(_MANAGER)
    return (*nodes, *(["reward_model"] if manager is not None and manager not in SCORER_CALLS else []))


_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*(\.*)([A-Za-z_][\w.]*)")


def referenced_keys(node: Mapping[str, Json], prefix: str = "") -> set[str]:
    """Return every key that an interpolation in a tree names."""
    found = set()
    for name, value in node.items():
        if isinstance(value, Mapping):
            found |= referenced_keys(value, f"{prefix}{name}.")
            continue
        for dots, key in _REFERENCE.findall(str(value)):
            above = f"{prefix}{name}".split(".")[: -len(dots)] if dots else []
            found.add(".".join([*above, key]))
    return found


def unknown_keys(tree: Mapping[str, Json], known: Collection[str]) -> list[str]:
    """Return the highest keys of a tree that are not ``known``, that its interpolations do not name either."""
    references = referenced_keys(tree)
    own = {key for key in references if key not in known}

    def is_read(key: str) -> bool:
        return any(is_under(each, [key]) for each in references) or is_under(key, own)

    def walk(node: Mapping[str, Json], prefix: str) -> Iterator[str]:
        names = _field_names(node.get("_target_"))
        for name, value in node.items():
            key = f"{prefix}{name}"
            if is_free(key, known) or name == "_target_" or (names is not None and not names):
                continue
            is_field = names is not None and name in names and renamed(key) is None
            if key in known or key in optional or is_field or is_read(key):
                if isinstance(value, Mapping):
                    yield from walk(value, f"{key}.")
            else:
                yield key

    optional = optional_keys(known)
    return list(walk(tree, ""))


def _field_names(target: Json) -> set[str] | None:
    """Return the field names of a node's class: None without a class, none for a user's class, which checks itself."""
    if target is None:
        return None
    if not str(target).startswith(("verl.", "recipe.")):
        return set()
    try:
        found = pkgutil.resolve_name(str(target))
    except (ImportError, AttributeError, ValueError):  # the check of the node names it
        return set()
    return {each.name for each in fields(found)} if is_dataclass(found) else set()


def replaced_keys(tree: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield each key of another version in a tree, unless an interpolation reads it, and its replacement."""
    references = referenced_keys(tree)
    seen: list[str] = []
    for key in dotted_keys(tree):
        value = select(tree, key)
        row = None if is_under(key, seen) else row_of(key, value, tree)
        if row is None or row.is_ours or row.needs_nothing(key, value):
            continue
        if (row.key == key or not isinstance(value, Mapping)) and not any(is_under(each, [key]) for each in references):
            seen.append(key)
            yield Violation(key, value, row.message)


def renamed(key: str) -> str | None:
    """Return the replacement of a key of earlier versions; None if the key is not one."""
    row = row_of(key)
    return row.message if row is not None and not row.roots else None
