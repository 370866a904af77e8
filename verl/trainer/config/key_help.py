"""The text of ``--help KEY``: meaning, type, default and legal values of a key, or of all keys of a node."""

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import BaseConfig, NodeReader, as_yaml, described_field
from verl.trainer.config.keys import dotted_keys, optional_keys, select
from verl.trainer.config.run_config import parse_tree
from verl.trainer.config.sft import SFTConfig

_LINE = re.compile(r"^( *)(?:#\s?(?P<comment>.*)|(?P<key>[\w.]+):.*)$")
_WIDTH = 110


def key_help(key: str, config: DictConfig, config_name: str, folder: str) -> str | None:
    """Return the help for a key or a node of a composed configuration; None if there is no such key."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    fields_of = _typed(tree, config)
    value = select(tree, key, _ABSENT)
    if value is _ABSENT and key not in optional_keys(dotted_keys(tree)):
        return None
    comments = comments_of(config_name, folder)
    if not isinstance(value, Mapping):
        return _entry(key, value, comments, fields_of)
    inside = [f"{key}.{name}" for name in value if name != "_target_"]
    entries = [_entry(each, select(tree, each), comments, fields_of) for each in inside]
    return "\n".join([f"{key}: {comments.get(key, 'a node')}\n", *entries])


_ABSENT = object()


def _typed(tree: Mapping[str, Any], config: DictConfig) -> Any:
    """Return the tree as dataclasses, where the command has some."""
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException:
        resolved = tree
    if "actor_rollout_ref" in tree and "trainer" in tree:
        return parse_tree(resolved, use_critic=True)[0]
    return NodeReader().build(resolved, "", SFTConfig) if "engine" in tree else None


def _entry(key: str, value: Any, comments: Mapping[str, str], run: Any) -> str:
    """Return the paragraph of one key."""
    found = _field(key, run)
    meaning = comments.get(key) or (found.meaning if found else "") or "no comment in the YAML"
    rows = [] if found is None else [("type", found.type)]
    if isinstance(value, Mapping):
        rows = [("node with", ", ".join(name for name in value if name != "_target_") or "free keys")]
    elif value is not _ABSENT:
        rows.append(("default", "must be given" if value == "???" else as_yaml(value)))
    elif found is not None:
        rows.append(("default", as_yaml(found.default)))
    text = textwrap.fill(meaning, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines = [
        textwrap.fill(f"{name:<9} {content}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 14)
        for name, content in rows
    ]
    return "\n".join([key, text, *lines, ""])


def _field(key: str, run: Any) -> Any:
    node, _, name = key.rpartition(".")
    for each in node.split(".") if node else ():
        run = getattr(run, each, None)
    if isinstance(run, BaseConfig) and any(each.name == name for each in fields(run)):
        return described_field(type(run), name)
    return None


# ---- the comments in the YAML files


def comments_of(config_name: str, folder: str) -> dict[str, str]:
    """Return the comment above each key of the files that a configuration is composed of; Hydra is set up."""
    loader: Any = GlobalHydra.instance().config_loader()
    composed = loader.compute_defaults_list(config_name, [], RunMode.RUN)
    found: dict[str, str] = {}
    for each in composed.defaults:
        name = f"{os.path.normpath(each.config_path).removesuffix('.yaml')}.yaml"
        file = next((path for path in (Path(folder, name), Path(__file__).parent / name) if path.is_file()), None)
        if file is not None:
            prefix = f"{each.package}." if each.package else ""
            found |= {f"{prefix}{key}": text for key, text in comments_in(file.read_text(encoding="utf-8"))}
    return found


def comments_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield each dotted key of a YAML file with the comment above it, as one paragraph."""
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            above = []
        elif match["key"] is None:
            above.append(match["comment"].strip())
        else:
            depth = len(match[1])
            path = [*(each for each in path if each[0] < depth), (depth, match["key"])]
            if above:
                yield ".".join(name for _, name in path), " ".join(above)
            above = []
