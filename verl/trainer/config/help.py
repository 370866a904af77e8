"""The text of ``--help``: how overrides are written, and which keys there are."""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hydra
from omegaconf import OmegaConf

from verl.trainer.config.keys import dotted_keys, select

_USAGE = """\
{what}

usage: python -m {module} [key=value ...] [flags]

  a.b.c=value             set a key; one that does not exist is refused with the nearest that do
  +a.b.c=value            add a key below a free node, such as actor_rollout_ref.model.override_config
  ~a.b.c                  delete a key
  --cfg job               show the composed configuration and end; --resolve resolves its interpolations
  --config-name NAME      compose another file of {folder}, or of --config-dir
  --hydra-help            flags and groups of Hydra itself

Every key has its meaning, units and legal values in a comment in the YAML files of {folder};
docs/configuration.md says which to begin with."""


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
