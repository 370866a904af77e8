"""Find keys that nothing reads, in the command line and the files of a command."""

import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import hydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from verl.base_config import Violation, as_yaml
from verl.trainer.config.keys import (
    NO_READER,
    USER_CODE,
    dotted_keys,
    is_free,
    is_under,
    nodes_of_user_code,
    optional_keys,
    renamed,
    select,
    tree_of,
    unknown_keys,
)
from verl.trainer.config.similar import similar_keys
from verl.trainer.config.written import CONFIG_DIR
from verl.utils.json_types import Json

logger = logging.getLogger(__name__)

TREES = ("ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""Files of CONFIG_DIR that commands take although they come with another one."""


class Command(NamedTuple):
    """The YAML file that comes with a command, its folder, and whether the command is code of the user."""

    config_name: str
    folder: str
    is_own: bool = False


class KeyChecker:
    """Finds keys that nothing reads, in the overrides and files of one command line."""

    def __init__(self, command: Command, tree: Mapping[str, Json], overrides: list[Override], known: set[str]) -> None:
        self.tree = tree
        self.is_own = command.is_own
        self.unknown = unknown_keys(tree, known)  # unknown keys of the files
        self.in_files = set(dotted_keys(tree))
        self.known = known | {key for key in self.in_files if not is_under(key, self.unknown)}
        self.own_nodes = nodes_of_user_code(_with_switches(tree, overrides))
        self.read_by_user: list[str] = []

    def of_override(self, key: str, override: Override) -> Iterator[Violation]:
        """Yield the key of an override if nothing reads it."""
        may_add = self.is_own and override.is_add()
        yield from self._check(
            key, value_text(override), may_add, may_delete=not override.is_delete(), adds=override.is_add()
        )

    def of_files(self) -> Iterator[Violation]:
        """Yield each key of the files that nothing reads."""
        for key in self.unknown:
            yield from self._check(key, select(self.tree, key), self.is_own)

    def _check(
        self, key: str, value: Json, may_add: bool, may_delete: bool = True, adds: bool = False
    ) -> Iterator[Violation]:
        text = renamed(key)
        optional = optional_keys(self.known)
        if text is not None and key not in self.known:
            yield Violation(key, value, text)
        elif key in self.known or key in optional or is_free(key, self.known):
            return
        elif key in NO_READER:
            logger.warning("%s=%s: accepted, but nothing reads it", key, value)
        elif may_delete and (may_add or "" in self.own_nodes or is_under(key, self.own_nodes)):
            self.read_by_user.append(f"{key}={as_yaml(value)}")
        else:
            hint = "; if your code reads it, write a + before it" if self.is_own and may_delete else ""
            if adds and not self.is_own:
                hint = self._how_to_add(key)
            yield Violation(key, value, f"there is no such key{nearest_text(key, self.known)}{hint}")

    def _how_to_add(self, key: str) -> str:
        """Say how a node with a dataclass gets a key; empty for another node."""
        node, _, name = key.rpartition(".")
        target = select(self.tree, f"{node}._target_")
        if target is None:
            return ""
        cls = str(target).rpartition(".")[2]
        return (
            f"; {node} has the keys of the dataclass {target}. To add one, derive yours, "
            f"`@dataclass class Mine({cls}): {name}: int = 0`, and write {node}._target_=my_module.Mine"
        )

    def give_notices(self) -> None:
        """Name the keys that only code of the user may read."""
        _tell(self.read_by_user)


HAS_CHECKED = ContextVar("has_checked", default=False)
"""Whether a command has checked the keys of its tree."""


def tell_unread_keys(config: DictConfig, config_name: str) -> None:
    """Name the keys that only code of the user may read, in a tree that no command has composed.

    ``config_name`` is the file of the command that reads such trees.
    """
    if HAS_CHECKED.get():
        return
    tree = tree_of(config, resolve=False)
    unread = unknown_keys(tree, shipped_keys(Command(config_name, CONFIG_DIR), tree))
    _tell([f"{key}={as_yaml(select(tree, key))}" for key in unread if renamed(key) is None])


def _tell(unread: Iterable[str]) -> None:
    shown = ", ".join(dict.fromkeys(unread))
    if shown:
        logger.warning("verl reads none of these keys, your code may: %s. A misspelled key has no effect", shown)


def nearest_text(key: str, known: Collection[str]) -> str:
    """Return the part of a message that names keys similar to a key that does not exist."""
    similar = ", ".join(similar_keys(key, {*known, *optional_keys(known)}))
    return f"; the nearest: {similar}" if similar else ", nor one like it: remove it, or choose one of --help"


def value_text(override: Override) -> str:
    """Return the value as it was written."""
    if override.is_delete():
        return ""
    if override.is_sweep_override():
        return str(override.input_line).partition("=")[2]
    return str(override.get_value_element_as_str())


def _with_switches(tree: Mapping[str, Json], overrides: list[Override]) -> DictConfig:
    """Return a tree with the values of the overrides that name user code."""
    config = OmegaConf.create(dict(tree))
    for each in overrides:
        names_code = any(is_under(switch, [each.key_or_group]) for switch in USER_CODE)
        if names_code and not each.is_delete() and not each.is_sweep_override():
            OmegaConf.update(config, each.key_or_group, each.value(), force_add=True)
    return config


def shipped_keys(command: Command, tree: Mapping[str, Json]) -> set[str]:
    """Return the keys of the files that come with a command, for trees like ``tree`` and every strategy."""
    files: list[tuple[str, str, list[str]]] = [(command.folder, command.config_name, [])]
    if "actor_rollout_ref" in tree:
        files.append((CONFIG_DIR, "ppo_megatron_trainer", []))
    elif command.config_name.startswith("sft_trainer"):
        megatron = ["engine=megatron", "optim=megatron"]
        files = [(CONFIG_DIR, "sft_trainer_engine", groups) for groups in ([], megatron)]
        files = files if "engine" in tree else [(CONFIG_DIR, "sft_trainer", [])]
    return {key for folder, name, groups in files for key in _keys_of_file(folder, name, *groups)}


@functools.cache
def _keys_of_file(folder: str, name: str, *groups: str) -> list[str]:
    """Return the keys of a file that comes with a command."""
    with hydra.initialize_config_dir(folder, version_base=None):
        composed = tree_of(hydra.compose(name, list(groups)), resolve=False)
    return dotted_keys(composed)
