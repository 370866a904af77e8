"""Tell keys that the user wrote, on the command line or in a file, from defaults."""

import importlib.resources
import os
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from verl.trainer.config.keys import ABSENT, is_under, select
from verl.utils.json_types import Json

CONFIG_DIR = str(Path(__file__).parent)
"""The folder of our YAML files."""


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
    return on_command_line or any(select(tree, key, ABSENT) is not ABSENT for tree in _files_of_user())


def _files_of_user() -> Iterator[dict[str, Json]]:
    """Yield the contents of the composed files outside verl's folder, each below the node at which it is mounted."""
    saved = HydraConfig.get()
    for file, node in composed_files(saved.job.config_name, [*saved.overrides.task, *saved.overrides.hydra]):
        if not file.is_relative_to(CONFIG_DIR):
            yield content(file, node)


def composed_files(config_name: str | None, overrides: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield the files that the present Hydra composes, and the dotted node that each is mounted at."""
    loader = GlobalHydra.instance().config_loader()
    composed = loader.compute_defaults_list(config_name, overrides, RunMode.RUN)
    folders = [_folder(source.scheme(), source.path) for source in loader.get_sources() if source.path]
    for each in composed.defaults:
        name = f"{os.path.normpath(each.config_path).removesuffix('.yaml')}.yaml"
        found = [folder / name for folder in folders if (folder / name).is_file()]
        yield from ((file, each.package or "") for file in found[:1])


def content(file: Path, node: str) -> dict[str, Json]:
    """Return the content of a file below the node that it is mounted at."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for name in reversed(node.split(".") if node else []):
        tree = {name: tree}
    return tree


def _folder(schema: str, path: str) -> Path:
    return Path(str(importlib.resources.files(path))) if schema == "pkg" else Path(path)
