"""The command line of every entry point: Hydra, with error messages that suggest the right key."""

import functools
import inspect
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, NoReturn, cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import PROBLEM, ConfigError, Violation, WrongInput, as_yaml, nearest, parse_node
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
    unknown_keys,
    without,
)
from verl.trainer.config.other_versions import row_of
from verl.trainer.config.similar import similar_keys
from verl.trainer.config.translation import Translation, file_of_engine
from verl.trainer.config.written import composed_files, content
from verl.utils.import_utils import PACKAGE, absolute_name
from verl.utils.interrupts import caught_signals, leave_before_the_run
from verl.utils.masking import MASK, masked, masked_text, secrets_in
from verl.utils.terminal_text import as_typed, escape_in_terminal, locale_problem

logger = logging.getLogger(__name__)

CONFIG_DIR = str(Path(__file__).parent)
USAGE_ERROR = 2
_LEAST_SECRET = 6
"""Length from which a secret is also searched for in texts; a shorter one may be part of a common word."""
MOST_LINES = 5
MOST_CHARACTERS = 1000
"""The most lines of a message in the terminal, and the most characters of such a line."""
MOST_PROBLEMS = 20
"""The most problems that the terminal shows; a file takes them all if there are more."""
CHECK = "--check"
NOT_LOOKED_AT = f"data, models and your code were not looked at: {CHECK} looks at all"


@dataclass
class _Invocation:
    """How the command of this process was called: to check only, and with keys that it has refused and left out."""

    only_checks: bool = False
    refused: list[Violation] = field(default_factory=list)


_invocation = _Invocation()


def only_checks() -> bool:
    """Whether the command was called to check its inputs and stop."""
    return _invocation.only_checks


def refused_keys() -> list[Violation]:
    """Return what the command line of a check holds that no configuration can: it was left out."""
    return _invocation.refused


_RELATIVE = re.compile(rf"(?:_target_:\s*|{PACKAGE})[\"']?\.")
"""A name of a class or module that is relative to the folder of its file."""


def hydra_main(
    config_name: str, config_path: str = CONFIG_DIR
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Turn a function of a config into a command, like ``hydra.main``.

    A wrong key or value ends the command with a list of what is wrong and exit code 2, instead of a stack trace. Keys
    that may be absent from the YAML are accepted with and without a leading ``+``.
    """

    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        folder = os.path.join(os.path.dirname(inspect.getfile(function)), config_path)

        @functools.wraps(function)
        def task(config: Any) -> None:
            try:
                _hide_secrets(config)
                _refuse_unreadable(config)
                _HAS_CHECKED.set(True)
                with caught_signals():
                    function(config)
            except WrongInput as error:
                _exit(error)
            except KeyboardInterrupt:
                if _is_of_user(function):
                    raise
                leave_before_the_run()  # a run that has begun ends by itself

        @functools.wraps(function)
        def command() -> None:
            escape_in_terminal()
            if not _has_working_folder():
                _exit("the working folder has been deleted: change to one that exists")
            _invocation.only_checks = CHECK in sys.argv[1:]
            words = [word for word in sys.argv[1:] if word != CHECK]
            if wrong := unknown_flag(words):
                _exit(wrong)
            flags = get_args_parser().parse_intermixed_args(words)
            if flags.help:
                named = flags.config_name or config_name
                sys.stdout.write(
                    keys_help(flags.overrides, named, folder) if flags.overrides else help_text(function, named, folder)
                )
                return
            if flags.cfg:
                sys.stderr.write(f"--cfg shows a configuration and does not check it: {CHECK} does\n")
            try:
                arguments = prepare_arguments(words, config_name, folder, is_own=_is_of_user(function))
            except OverrideParseException as error:
                _exit(unreadable(str(error.override)))
            except MissingConfigException as error:
                named = flags.config_name or config_name
                _exit(f"--config-name={named}: {str(error).splitlines()[0]}: write the name of a file in {folder}")
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                _exit(error)
            sys.argv[1:] = [*arguments, *(_WRITES_NOTHING if only_checks() else ())]
            hydra.main(config_path=folder, config_name=config_name, version_base=None)(task)()

        return command

    return decorate


def _refuse_unreadable(config: Any) -> None:
    """Refuse values that the locale cannot read.

    Raises: ConfigError naming their keys.
    """
    tree: Any = OmegaConf.to_container(config, resolve=False)
    values = {key: select(tree, key) for key in dotted_keys(tree)} | {"the working folder": os.getcwd()}
    texts = {key: " ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in values.items()}
    problems = [
        Violation(key, as_typed(text), problem)
        for key, text in texts.items()
        if not isinstance(values[key], Mapping) and (problem := locale_problem(text))
    ]
    if problems:
        raise ConfigError(problems)


_WRITES_NOTHING = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")
"""Overrides with which Hydra makes no folder and no log."""


def _is_of_user(function: Callable[..., Any]) -> bool:
    """Whether a function is neither of this package nor of the recipes that come with it."""
    package = Path(CONFIG_DIR).parents[1]
    file = Path(inspect.getfile(function)).resolve()
    return not any(file.is_relative_to(ours) for ours in (package, package.parent / "recipe"))


def unknown_flag(words: Iterable[str]) -> str | None:
    """Return the message for the first flag that does not exist; None if there is none."""
    known = [name for name in get_args_parser()._option_string_actions if name.startswith("--")]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and not any(name.startswith(flag) for name in known):
            similar = ", ".join(nearest(flag, [*known, CHECK])) or ", ".join(known)
            return (
                f"{flag}: there is no such flag; the nearest: {similar}; keys are written without dashes, as key=value"
            )
    return None


def keys_help(words: Iterable[str], config_name: str, folder: str, config_dir: str | None = None) -> str:
    """Return the help for keys and nodes, which may have values.

    Raises: SystemExit with 2 after a message for a key that does not exist.
    """
    from verl.trainer.config.key_help import key_help

    texts = []
    with _folders(folder, config_dir):
        config = hydra.compose(config_name)
        known = dotted_keys(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)))
        for word in words:
            key = word.partition("=")[0].lstrip("+~")
            text = key_help(key, config, config_name, folder)
            row = row_of(key, roots=config) if text is None else None
            if row is not None:
                text = f"{key}\n  {row.help}\n"
            if text is None:
                _exit(f"{key}: there is no such key{_nearest_text(key, known)}")
            texts.append(text)
    return "\n".join(texts)


def _nearest_text(key: str, known: Collection[str]) -> str:
    similar = ", ".join(similar_keys(key, {*known, *optional_keys(known)}))
    return f"; the nearest: {similar}" if similar else ", nor one like it: remove it, or choose one of --help"


def unreadable(override: str) -> str:
    """Say how to write an override that Hydra cannot parse."""
    key, equals, value = override.partition("=")
    quoted = f", for instance \"{key}='{value}'\"" if equals and " " not in key and "'" not in value else ""
    return f"{override!r} cannot be read: write key=value, with quotes around special characters{quoted}"


def _exit(error: Exception | str) -> NoReturn:
    sys.stderr.write(f"{masked_text(problems_shown(error))}\n")
    sys.exit(USAGE_ERROR)


def problems_shown(error: Exception | str) -> str:
    """Return the message of a refused input for the terminal.

    More problems than it shows go to a temporary file, which it names; with ``--check``, which writes none, it shows
    all.
    """
    lines = f"error in the configuration: {error}".splitlines()
    problems = [line for line in lines if line.startswith(PROBLEM)]
    notes = getattr(error, "__notes__", [])
    if not problems:
        return "\n".join([brief("\n".join(lines)), *notes])
    shown = lines if only_checks() or len(problems) <= MOST_PROBLEMS else lines[: MOST_PROBLEMS + 1]
    more = []
    if len(lines) > len(shown):
        try:
            more = [f"  ... and {len(lines) - len(shown)} more, in {_saved(lines)}"]
        except OSError:  # such as of a full disk
            shown = lines
    return "\n".join([brief("\n".join(shown), len(shown)), *more, *notes])


def _saved(lines: list[str]) -> str:
    """Write lines to a temporary file of the user and return its path."""
    with NamedTemporaryFile("w", prefix="verl-problems-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(masked_text("\n".join(lines) + "\n"))
    return file.name


def brief(message: str, most_lines: int = MOST_LINES) -> str:
    """Return a message as the terminal shows it: without empty lines, and not longer than a person reads."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if len(lines) > most_lines:
        lines = [*lines[: most_lines - 1], f"  ... and {len(lines) - most_lines + 1} more lines"]
    return "\n".join(line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..." for line in lines)


def _has_working_folder() -> bool:
    with suppress(FileNotFoundError):
        return bool(os.getcwd())
    return False


def _hide_secrets(config: Any) -> None:
    """Mask the secrets of a configuration in the files that Hydra has just written, and make these files private."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    hidden = masked(tree)
    if hidden == tree:
        return
    saved = HydraConfig.get()
    folder = Path(saved.runtime.output_dir)
    values = sorted({value for value in secrets_in(tree, hidden) if len(value) >= _LEAST_SECRET}, key=len, reverse=True)
    for file in [*folder.glob(f"{saved.output_subdir}/*.yaml"), *folder.parent.glob("multirun.yaml")]:
        text = yaml.safe_dump(masked(yaml.safe_load(file.read_text(encoding="utf-8"))), sort_keys=False)
        for value in values:
            text = text.replace(value, MASK)
        file.chmod(0o600)
        file.write_text(text, encoding="utf-8")


class Command(NamedTuple):
    """The YAML file that comes with a command, its folder, and whether the command is code of the user."""

    config_name: str
    folder: str
    is_own: bool = False


def prepare_arguments(arguments: list[str], config_name: str, folder: str, is_own: bool = False) -> list[str]:
    """Return the arguments as Hydra takes them; ``is_own`` says whether the command is code of the user.

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

    Without a ``command`` the file is that of one: all its keys exist. ``config_dir`` is a further folder of files.

    Raises: ConfigError listing every key that does not exist and, without ``multirun``, those with several values.
    """
    # Hydra knows a group that is mounted under its own name, as in data@data=x, by data=x only.
    short = [re.sub(r"^(\W?)(\w+)@\2=", r"\1\2=", override) for override in overrides]
    parsed = OverridesParser.create().parse_overrides(short)
    with _folders(folder, config_dir) as loader:
        in_groups = [each for each in parsed if _is_group(each, loader)]
        plain = [each for each in in_groups if not each.is_delete() and not each.is_sweep_override()]
        broken = [each for each in plain if not isinstance(each.value(), str | list)]
        if broken:
            expected = "must be a mapping, or the name of a file: set keys below it"
            raise ConfigError([Violation(each.key_or_group, each.value(), expected) for each in broken])
        groups = [str(each.input_line) for each in in_groups]
        base = hydra.compose(config_name, groups)
        names = make_names_absolute(base, config_name, groups)
    tree: Any = OmegaConf.to_container(base, resolve=False)
    command = command or Command(config_name, folder)
    is_shipped = (folder, config_name) in [command[:2][::-1], *((CONFIG_DIR, name) for name in _TREES)]
    is_of_user = bool(groups or config_dir) or not is_shipped
    known = _shipped_keys(command, tree) if is_of_user else set(dotted_keys(tree))
    other = Translation(parsed, tree, known, reads=lambda each: command.is_own and each.is_add())
    tree = without(tree, other.in_files)
    parsed = OverridesParser.create().parse_overrides(other.overrides)
    own = [each for each in parsed if str(each.input_line) not in groups]
    checker = _KeyChecker(command, tree, own, known)
    violations: list[Violation] = list(other.violations)
    fitted = [f"++{key}={name}" for key, name in names.items()] + other.before
    count = len(fitted)
    for override in parsed:
        line = str(override.input_line)
        if line in groups or override.key_or_group.startswith("hydra"):
            fitted.append(line)
            continue
        stays = override.is_delete() or (
            select(tree, override.key_or_group, _ABSENT) is not _ABSENT and not override.is_add()
        )
        fitted.append(line if stays else f"++{line.lstrip('+')}")
        violations += [violation for key in _keys_of(override) for violation in checker.of_override(key, override)]
        if override.is_sweep_override() and not multirun:
            expected = "are several values: write a list as [a,b], or quote a text that holds a comma"
            violations.append(Violation(override.key_or_group, _value_text(override), expected))
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
        _invocation.refused = violations
        checker.give_notices()
        return kept
    if violations:
        with _folders(folder, config_dir):
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
def _folders(folder: str, config_dir: str | None) -> Iterator[Any]:
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
        tree: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException):
        return []
    if "actor_rollout_ref" in tree:
        return parse_tree(tree)[1].mistyped
    return parse_node(tree, SFTConfig)[1] if "engine" in tree else []


def noted(error: ConfigError) -> ConfigError:
    """Return an error with the remark that the checks have ended early, unless ``--check`` has been given."""
    if not only_checks():
        error.add_note(NOT_LOOKED_AT)
    return error


def _is_group(override: Override, loader: Any) -> bool:
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


def _value_text(override: Override) -> str:
    """Return the value as it was written."""
    if override.is_delete():
        return ""
    if override.is_sweep_override():
        return str(override.input_line).partition("=")[2]
    return str(override.get_value_element_as_str())


_ABSENT = object()
_TREES = ("ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""Files of CONFIG_DIR that commands take although they come with another one."""


class _KeyChecker:
    """Tells keys that nothing reads from others, in the overrides and files of one command line."""

    def __init__(self, command: Command, tree: Mapping[str, Any], overrides: list[Override], known: set[str]) -> None:
        self.tree = tree
        self.is_own = command.is_own
        self.unknown = unknown_keys(tree, known)  # in the files
        self.in_files = set(dotted_keys(tree))
        self.known = known | {key for key in self.in_files if not is_under(key, self.unknown)}
        self.own_nodes = nodes_of_user_code(_with_switches(tree, overrides))
        self.read_by_user: list[str] = []

    def of_override(self, key: str, override: Override) -> Iterator[Violation]:
        """Yield the key of an override if nothing reads it."""
        may_add = self.is_own and override.is_add()
        yield from self._check(
            key, _value_text(override), may_add, may_delete=not override.is_delete(), adds=override.is_add()
        )

    def of_files(self) -> Iterator[Violation]:
        """Yield each key of the files that nothing reads."""
        for key in self.unknown:
            yield from self._check(key, select(self.tree, key), self.is_own)

    def _check(
        self, key: str, value: Any, may_add: bool, may_delete: bool = True, adds: bool = False
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
            yield Violation(key, value, f"there is no such key{_nearest_text(key, self.known)}{hint}")

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


_HAS_CHECKED = ContextVar("has_checked", default=False)
"""Whether a command has checked the keys of its tree."""


def tell_unread_keys(config: DictConfig, config_name: str) -> None:
    """Name the keys that only code of the user may read, in a tree that no command has composed.

    ``config_name`` is the file of the command that reads such trees.
    """
    if _HAS_CHECKED.get():
        return
    tree: Any = OmegaConf.to_container(config, resolve=False)
    unread = unknown_keys(tree, _shipped_keys(Command(config_name, CONFIG_DIR), tree))
    _tell([f"{key}={as_yaml(select(tree, key))}" for key in unread if renamed(key) is None])


def _tell(unread: Iterable[str]) -> None:
    shown = ", ".join(dict.fromkeys(unread))
    if shown:
        logger.warning("verl reads none of these keys, your code may: %s. A misspelled key has no effect", shown)


def _with_switches(tree: Mapping[str, Any], overrides: list[Override]) -> DictConfig:
    """Return a tree with the values of those overrides that name code of the user."""
    config = OmegaConf.create(dict(tree))
    for each in overrides:
        names_code = any(is_under(switch, [each.key_or_group]) for switch in USER_CODE)
        if names_code and not each.is_delete() and not each.is_sweep_override():
            OmegaConf.update(config, each.key_or_group, each.value(), force_add=True)
    return config


def _shipped_keys(command: Command, tree: Mapping[str, Any]) -> set[str]:
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
        composed: Any = OmegaConf.to_container(hydra.compose(name, list(groups)), resolve=False)
    return dotted_keys(composed)


# ---- the text of ``--help``


_USAGE = """\
{what}

usage: python -m {module} [key=value ...] [flags]

  a.b.c=value             set a key; if it does not exist, the error names the nearest keys
  +a.b.c=value            add a key below a free node, such as actor_rollout_ref.model.override_config
  ~a.b.c                  delete a key
  --check                 check configuration, data, models and your code, write nothing, and exit with 0 or 2
  --help KEY              meaning, type, default and legal values of a key, or of the keys of a node
  --cfg job               show the configuration and exit, unchecked; --resolve resolves its interpolations
  --config-name NAME      compose another file in {folder}, or in --config-dir
  --hydra-help            flags and groups of Hydra itself

A comment above each key in the YAML files of {folder} gives its meaning, unit and legal values;
docs/configuration.md says which keys to start with."""


def help_text(function: Callable[..., Any], config_name: str, folder: str) -> str:
    """Return the text for a command whose function and configuration are given."""
    with hydra.initialize_config_dir(folder, version_base=None):
        tree: Any = OmegaConf.to_container(hydra.compose(config_name), resolve=False)
    module = inspect.getmodule(function)
    name = module.__spec__.name if module is not None and module.__spec__ is not None else function.__module__
    doc = (inspect.getdoc(function) or "").split("\n", 1)[0]
    missing = [key for key in dotted_keys(tree) if select(tree, key) == "???"]
    parts = [_USAGE.format(what=doc, module=name, folder=folder)]
    if missing:
        parts.append(f"Keys that must be given: {', '.join(missing)}")
    parts.append("Keys:\n" + "\n".join(_nodes(tree)))
    return "\n\n".join(parts) + "\n"


def _nodes(node: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield a paragraph for each node of the first two levels: its dotted name, and the keys and nodes in it."""
    own = [f"{key}{'.*' if isinstance(value, Mapping) else ''}" for key, value in node.items() if key != "_target_"]
    if prefix:
        yield textwrap.fill(
            f"{prefix}: {' '.join(own)}", 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    if depth < 2:
        for key, value in node.items():
            if isinstance(value, Mapping) and (depth == 0 or prefix == "actor_rollout_ref"):
                yield from _nodes(value, f"{prefix}.{key}" if prefix else key, depth + 1)
