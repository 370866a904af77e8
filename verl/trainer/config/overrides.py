"""Adapt the overrides of a command line to the configuration tree, and list the impossible ones."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import ConfigError, Violation, parse_node
from verl.trainer.config.invocation import CHECK, call, noted, only_checks
from verl.trainer.config.keys import ABSENT, dotted_keys, select, tree_of, without
from verl.trainer.config.translation import Translation, file_of_engine
from verl.trainer.config.unread_keys import TREES, Command, KeyChecker, shipped_keys, value_text
from verl.trainer.config.written import CONFIG_DIR, composed_files, content
from verl.utils.import_utils import PACKAGE, absolute_name

_RELATIVE = re.compile(rf"(?:_target_:\s*|{PACKAGE})[\"']?\.")
"""A name of a class or module that is relative to the folder of its file."""


def prepare_arguments(arguments: list[str], config_name: str, folder: str, is_own: bool = False) -> list[str]:
    """Convert the arguments to Hydra's form; ``is_own`` is true if the command is code of the user.

    Raises: ConfigError listing every key that does not exist, in overrides and in files of the user, with the nearest
    keys; HydraException when an override cannot be parsed or a config file does not exist.
    """
    parsed = get_args_parser().parse_intermixed_args(arguments)
    if parsed.help or parsed.hydra_help or parsed.shell_completion:
        return arguments
    command = Command(config_name, folder, is_own)
    if parsed.config_path is not None:
        folder = os.path.abspath(os.path.join(folder, os.pardir, parsed.config_path))
        if not os.path.isdir(folder):
            folder = os.path.abspath(parsed.config_path)
    if parsed.config_dir and not os.path.isdir(parsed.config_dir):
        raise ConfigError([Violation("--config-dir", parsed.config_dir, "no such folder: write one with YAML files")])
    if only_checks() and parsed.multirun:
        raise ConfigError(
            [Violation("--multirun", True, f"starts several runs, and {CHECK} looks at one: leave it out")]
        )
    name = parsed.config_name or file_of_engine(parsed.overrides, config_name, folder)
    overrides = fitted_overrides(parsed.overrides, name, folder, parsed.config_dir, bool(parsed.multirun), command)
    kept = [argument for argument in arguments if argument not in parsed.overrides]
    moved = ["--config-path", folder] if parsed.config_path is not None else []
    moved += ["--config-name", name] if name != (parsed.config_name or config_name) else []
    return kept + moved + overrides


def fitted_overrides(
    overrides: list[str],
    config_name: str,
    folder: str,
    config_dir: str | None = None,
    multirun: bool = False,
    command: Command | None = None,
) -> list[str]:
    """Return the overrides in the spelling that Hydra takes, whether their key is in the YAML or not.

    Without a ``command`` all keys of the configuration file exist. ``config_dir`` is a further folder of files.

    Raises: ConfigError listing every key that does not exist and, without ``multirun``, those with several values.
    """
    # Hydra knows a group that is mounted under its own name, as in data@data=x, by data=x only.
    short = [re.sub(r"^(\W?)(\w+)@\2=", r"\1\2=", override) for override in overrides]
    parsed = OverridesParser.create().parse_overrides(short)
    with folders(folder, config_dir) as loader:
        in_groups = [each for each in parsed if _is_group(each, loader)]
        plain = [each for each in in_groups if not each.is_delete() and not each.is_sweep_override()]
        broken = [each for each in plain if not isinstance(each.value(), str | list)]
        if broken:
            expected = "must be a mapping, or the name of a file: set keys below it"
            raise ConfigError([Violation(each.key_or_group, each.value(), expected) for each in broken])
        groups = [str(each.input_line) for each in in_groups]
        base = hydra.compose(config_name, groups)
        names = make_names_absolute(base, config_name, groups)
    tree = tree_of(base, resolve=False)
    command = command or Command(config_name, folder)
    is_shipped = (folder, config_name) in [command[:2][::-1], *((CONFIG_DIR, name) for name in TREES)]
    is_of_user = bool(groups or config_dir) or not is_shipped
    known = shipped_keys(command, tree) if is_of_user else set(dotted_keys(tree))
    other = Translation(parsed, tree, known, reads=lambda each: command.is_own and each.is_add())
    tree = without(tree, other.in_files)
    parsed = OverridesParser.create().parse_overrides(other.overrides)
    own = [each for each in parsed if str(each.input_line) not in groups]
    checker = KeyChecker(command, tree, own, known)
    violations: list[Violation] = list(other.violations)
    fitted = [f"++{key}={name}" for key, name in names.items()] + other.before
    count = len(fitted)
    for override in parsed:
        line = str(override.input_line)
        if line in groups or override.key_or_group.startswith("hydra"):
            fitted.append(line)
            continue
        stays = override.is_delete() or (
            select(tree, override.key_or_group, ABSENT) is not ABSENT and not override.is_add()
        )
        fitted.append(line if stays else f"++{line.lstrip('+')}")
        violations += [violation for key in _keys_of(override) for violation in checker.of_override(key, override)]
        if override.is_sweep_override() and not multirun:
            expected = "are several values: write a list as [a,b], or quote a text that holds a comma"
            violations.append(Violation(override.key_or_group, value_text(override), expected))
        elif _is_list(override) and isinstance(select(tree, override.key_or_group), Mapping):
            violations.append(
                Violation(override.key_or_group, override.value(), "must be a mapping: set keys below it")
            )
    violations += checker.of_files()
    wrong = {violation.key for violation in violations}
    written = zip(fitted[count:], parsed, strict=True)
    kept = [line for line, each in written if not wrong & {each.key_or_group, *_keys_of(each)}]
    kept = [*fitted[:count], *kept]
    other.tell()
    if only_checks():
        call.refused = violations
        checker.give_notices()
        return kept
    if violations:
        with folders(folder, config_dir):
            wrong_types = _wrong_types(config_name, [line for line in kept if not line.startswith("hydra")])
        raise noted(ConfigError([*violations, *wrong_types]))
    checker.give_notices()
    return fitted


def make_names_absolute(config: DictConfig, config_name: str, overrides: list[str]) -> dict[str, str]:
    """Replace the relative names of classes and modules in a composed tree; see ``absolute_name``.

    They are values of ``_target_``, and values that begin with ``pkg://``. Needs the Hydra that has composed the tree.
    Returns: key -> new value.
    """
    replaced = {}
    for file, node in composed_files(config_name, overrides):
        if not _RELATIVE.search(file.read_text(encoding="utf-8")):
            continue
        tree = content(file, node)
        for key in dotted_keys(tree):
            value = str(select(tree, key))
            name = value.removeprefix(PACKAGE)
            is_name = name != value or key.endswith("._target_")
            if is_name and name.startswith(".") and select(config, key) == value:
                replaced[key] = value.removesuffix(name) + absolute_name(name, file.parent)
                OmegaConf.update(config, key, replaced[key])
    return replaced


@contextmanager
def folders(folder: str, config_dir: str | None) -> Iterator[ConfigLoader]:
    """Let Hydra compose from a folder, and from that of ``--config-dir``; yield its loader of files."""
    with hydra.initialize_config_dir(folder, version_base=None):
        loader: Any = GlobalHydra.instance().config_loader()
        if config_dir:
            loader.get_search_path().prepend("command-line", f"file://{os.path.abspath(config_dir)}", "schema")
            loader.repository.initialize_sources(loader.get_search_path())
        yield loader


def _wrong_types(config_name: str, overrides: list[str]) -> list[Violation]:
    """Return the values of the wrong type in a tree of PPO or of supervised training, next to keys that are wrong."""
    from verl.trainer.config.run_config import parse_tree
    from verl.trainer.config.sft import SFTConfig

    try:
        config = hydra.compose(config_name, overrides)
        tree = tree_of(config)
    except (HydraException, OmegaConfBaseException):
        return []
    if "actor_rollout_ref" in tree:
        return parse_tree(tree)[1].mistyped
    return parse_node(tree, SFTConfig)[1] if "engine" in tree else []


def _is_group(override: Override, loader: ConfigLoader) -> bool:
    name = override.key_or_group
    if override.package or "/" in name:
        return True
    sets_a_node = not override.is_sweep_override() and isinstance(override.value(), Mapping)
    return "." not in name and not sets_a_node and bool(loader.get_group_options(name))


def _is_list(override: Override) -> bool:
    return not override.is_delete() and not override.is_sweep_override() and isinstance(override.value(), list)


def _keys_of(override: Override) -> Iterator[str]:
    """Yield the keys that an override sets or deletes: one, or those of the mapping that is its value."""
    value = None if override.is_sweep_override() else override.value()
    if isinstance(value, Mapping) and value:
        yield from dotted_keys(value, f"{override.key_or_group}.")
    else:
        yield override.key_or_group
