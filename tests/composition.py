"""Compose configurations as Hydra does, but merge the files once for all overrides that choose no other files."""

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from verl.trainer.config.overrides import make_names_absolute


@cache
def _pickled(folder: Path, name: str, overrides: tuple[str, ...]) -> bytes:
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(name, list(overrides))
        make_names_absolute(config, name, list(overrides))
    return pickle.dumps(config)


def _chooses_a_file(override: Override) -> bool:
    key = override.key_or_group
    return override.package is not None or "." not in key or key.startswith("hydra.")


def composed_config(folder: Path, name: str, overrides: Sequence[str], base: Sequence[str] = ()) -> DictConfig:
    """Compose a file with the overrides ``base``, which many trees share, and then those of this tree."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if any(map(_chooses_a_file, parsed)):
        base, parsed = (*base, *overrides), []
    config: DictConfig = pickle.loads(_pickled(folder, name, tuple(base)))
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return config
