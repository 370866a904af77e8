"""The command line of every entry point: Hydra, with error messages that suggest the right key."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import ConfigError, Violation, nearest
from verl.errors import WrongInput
from verl.trainer.config.invocation import CHECK, call, only_checks
from verl.trainer.config.keys import dotted_keys, select, tree_of
from verl.trainer.config.other_versions import ENGINE_OF_FILES
from verl.trainer.config.overrides import prepare_arguments
from verl.trainer.config.problems import leave_refused
from verl.trainer.config.unread_keys import HAS_CHECKED
from verl.trainer.config.written import CONFIG_DIR as CONFIG_DIR
from verl.utils.masking import MASK, masked, secrets_in
from verl.utils.process.interrupts import caught_signals, leave_before_the_run
from verl.utils.terminal_text import as_typed, escape_in_terminal, locale_problem

_LEAST_SECRET = 6
"""Length from which a secret is also searched for in texts; a shorter one may be part of a common word."""


def hydra_main(
    config_name: str, config_path: str = CONFIG_DIR
) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Turn a function of a config into a command, like ``hydra.main``.

    A wrong key or value ends the command with a list of what is wrong and exit code 2, instead of a stack trace. Keys
    that may be absent from the YAML are accepted with and without a leading ``+``.
    """

    def decorate(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        folder = os.path.join(os.path.dirname(inspect.getfile(function)), config_path)

        @functools.wraps(function)
        def task(config: DictConfig) -> None:
            try:
                _hide_secrets(config)
                _refuse_unreadable(config)
                HAS_CHECKED.set(True)
                with caught_signals():
                    function(config)
            except WrongInput as error:
                leave_refused(error)
            except KeyboardInterrupt:
                if _is_of_user(function):
                    raise
                leave_before_the_run()  # only before the run: a started run handles Ctrl-C itself

        @functools.wraps(function)
        def command() -> None:
            escape_in_terminal()
            if not _has_working_folder():
                leave_refused("the working folder has been deleted: change to one that exists")
            call.only_checks = CHECK in sys.argv[1:]
            words = [word for word in sys.argv[1:] if word != CHECK]
            if wrong := unknown_flag(words):
                leave_refused(wrong)
            flags = get_args_parser().parse_intermixed_args(words)
            if flags.help:
                from verl.trainer.config.help_text import help_text, keys_help

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
                leave_refused(unreadable(str(error.override)))
            except MissingConfigException as error:
                leave_refused(missing_file(error, flags.config_name or config_name, folder))
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                leave_refused(error)
            sys.argv[1:] = [*arguments, *(_WRITES_NOTHING if only_checks() else ())]
            hydra.main(config_path=folder, config_name=config_name, version_base=None)(task)()

        return command

    return decorate


def missing_file(error: MissingConfigException, config_name: str, folder: str) -> str:
    """Return the message for a configuration file, or a choice of a group of files, that does not exist."""
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    if group == ENGINE_OF_FILES:
        remedy = {
            "dp": "leave it out: FSDP trains unless the files of Megatron-Core are named",
            "megatron": "leave it out, and name ppo_megatron_trainer in place of ppo_trainer",
        }.get(choice, "leave it out: FSDP (ppo_trainer) and Megatron-Core (ppo_megatron_trainer) are the engines here")
        return f"--config-name={config_name}: its defaults name {group}: {choice}, a key of another version: {remedy}"
    found = str(error).splitlines()[0]
    if group and error.options:
        return f"--config-name={config_name}: {found}: write one of {', '.join(error.options)}"
    return f"--config-name={config_name}: {found}: write the name of a file in {folder}"


def _refuse_unreadable(config: DictConfig) -> None:
    """Refuse values that the locale cannot read.

    Raises: ConfigError naming their keys.
    """
    tree = tree_of(config, resolve=False)
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


def _is_of_user(function: Callable[[DictConfig], None]) -> bool:
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


def unreadable(override: str) -> str:
    """Say how to write an override that Hydra cannot parse."""
    key, equals, value = override.partition("=")
    quoted = f", for instance \"{key}='{value}'\"" if equals and " " not in key and "'" not in value else ""
    return f"{override!r} cannot be read: write key=value, with quotes around special characters{quoted}"


def _has_working_folder() -> bool:
    with suppress(FileNotFoundError):
        return bool(os.getcwd())
    return False


def _hide_secrets(config: DictConfig) -> None:
    """Mask the secrets of a configuration in the files that Hydra has just written, and make these files private."""
    tree = tree_of(config, resolve=False)
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
