"""Tell the keys that the user has written, on the command line or in a file, from those that have their default."""

import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from verl.trainer.config.keys import is_under, select

_CONFIG_DIR = Path(__file__).parent
_ABSENT = object()


def overrides_given() -> set[str]:
    """Return the keys that the command line of this process sets."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return {override.partition("=")[0].lstrip("+") for override in given}


def is_written(key: str) -> bool:
    """Whether the command line, or a configuration file that is not one of ours, sets a key.

    A tree that no command of Hydra has composed comes from code of the user, who may have set any key.
    """
    if not HydraConfig.initialized():
        return True
    on_command_line = any(is_under(key, [given]) for given in overrides_given())
    return on_command_line or any(select(tree, key, _ABSENT) is not _ABSENT for tree in _files_of_user())


def _files_of_user() -> Iterator[dict[str, Any]]:
    """Yield the contents of the composed files outside our folder, each below the node that it is mounted at."""
    saved = HydraConfig.get()
    loader: Any = GlobalHydra.instance().config_loader()
    overrides = [*saved.overrides.task, *saved.overrides.hydra]
    composed = loader.compute_defaults_list(saved.job.config_name, overrides, RunMode.RUN)
    folders = [_folder(source.schema, source.path) for source in saved.runtime.config_sources if source.path]
    for each in composed.defaults:
        name = f"{os.path.normpath(each.config_path).removesuffix('.yaml')}.yaml"
        folder = next((folder for folder in folders if (folder / name).is_file()), _CONFIG_DIR)
        if folder != _CONFIG_DIR:
            tree = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
            for node in reversed(each.package.split(".") if each.package else []):
                tree = {node: tree}
            yield tree or {}


def _folder(schema: str, path: str) -> Path:
    return Path(str(importlib.resources.files(path))) if schema == "pkg" else Path(path)
