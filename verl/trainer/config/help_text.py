"""The text of ``--help``, and that of ``--help KEY``: meaning, type, default and legal values."""

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import BaseConfig, FieldHelp, NodeReader, as_yaml, described_field
from verl.trainer.config.keys import ABSENT, Absent, dotted_keys, optional_keys, select, tree_of
from verl.trainer.config.other_versions import row_of
from verl.trainer.config.overrides import folders
from verl.trainer.config.problems import leave_refused
from verl.trainer.config.run_config import RunConfig, parse_tree
from verl.trainer.config.sft import SFTConfig
from verl.trainer.config.unread_keys import nearest_text
from verl.utils.json_types import Json

_LINE = re.compile(r"^( *)(?:#\s?(?P<comment>.*)|(?P<key>[\w.]+):.*)$")
_WIDTH = 110


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


def keys_help(words: Iterable[str], config_name: str, folder: str, config_dir: str | None = None) -> str:
    """Return the help for keys and nodes, which may have values.

    Raises: SystemExit with 2 after a message for a key that does not exist.
    """
    texts = []
    with folders(folder, config_dir):
        config = hydra.compose(config_name)
        known = dotted_keys(tree_of(config, resolve=False))
        for word in words:
            key = word.partition("=")[0].lstrip("+~")
            text = key_help(key, config, config_name, folder)
            row = row_of(key, roots=config) if text is None else None
            if row is not None:
                text = f"{key}\n  {row.help}\n"
            if text is None:
                leave_refused(f"{key}: there is no such key{nearest_text(key, known)}")
            texts.append(text)
    return "\n".join(texts)


def help_text(function: Callable[[DictConfig], None], config_name: str, folder: str) -> str:
    """Return the text for a command whose function and configuration are given."""
    with hydra.initialize_config_dir(folder, version_base=None):
        tree = tree_of(hydra.compose(config_name), resolve=False)
    module = inspect.getmodule(function)
    name = module.__spec__.name if module is not None and module.__spec__ is not None else function.__module__
    doc = (inspect.getdoc(function) or "").split("\n", 1)[0]
    missing = [key for key in dotted_keys(tree) if select(tree, key) == "???"]
    parts = [_USAGE.format(what=doc, module=name, folder=folder)]
    if missing:
        parts.append(f"Keys that must be given: {', '.join(missing)}")
    parts.append("Keys:\n" + "\n".join(_nodes(tree)))
    return "\n\n".join(parts) + "\n"


def _nodes(node: Mapping[str, Json], prefix: str = "", depth: int = 0) -> Iterator[str]:
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


# ---- one key


def key_help(key: str, config: DictConfig, config_name: str, folder: str) -> str | None:
    """Return the help for a key or a node of a composed configuration; None if there is no such key."""
    tree = tree_of(config, resolve=False)
    fields_of = _typed(tree, config)
    value = select(tree, key, ABSENT)
    if value is ABSENT and key not in optional_keys(dotted_keys(tree)):
        return None
    comments = comments_of(config_name, folder)
    if not isinstance(value, Mapping):
        return _entry(key, value, comments, fields_of)
    inside = [f"{key}.{name}" for name in value if name != "_target_"]
    entries = [_entry(each, select(tree, each), comments, fields_of) for each in inside]
    return "\n".join([f"{key}: {comments.get(key, 'a node')}\n", *entries])


def _typed(tree: Mapping[str, Json], config: DictConfig) -> RunConfig | BaseConfig | None:
    """Return the tree as dataclasses, where the command has some."""
    try:
        resolved: Mapping[str, Json] = tree_of(config)
    except OmegaConfBaseException:
        resolved = tree
    if "actor_rollout_ref" in tree and "trainer" in tree:
        return parse_tree(resolved, use_critic=True)[0]
    return NodeReader().build(resolved, "", SFTConfig) if "engine" in tree else None


def _entry(key: str, value: Json | Absent, comments: Mapping[str, str], run: RunConfig | BaseConfig | None) -> str:
    """Return the paragraph of one key."""
    found = _field(key, run)
    meaning = comments.get(key) or (found.meaning if found else "") or "no comment in the YAML"
    rows = [] if found is None else [("type", found.type)]
    if isinstance(value, Mapping):
        rows = [("node with", ", ".join(name for name in value if name != "_target_") or "free keys")]
    elif value is not ABSENT:
        rows.append(("default", "must be given" if value == "???" else as_yaml(value)))
    elif found is not None:
        rows.append(("default", as_yaml(found.default)))
    text = textwrap.fill(meaning, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    lines = [
        textwrap.fill(f"{name:<9} {content}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 14)
        for name, content in rows
    ]
    return "\n".join([key, text, *lines, ""])


def _field(key: str, run: RunConfig | BaseConfig | None) -> FieldHelp | None:
    node, _, name = key.rpartition(".")
    for each in node.split(".") if node else ():
        run = getattr(run, each, None)
    if isinstance(run, BaseConfig) and any(each.name == name for each in fields(run)):
        return described_field(type(run), name)
    return None


# ---- the comments in the YAML files


def comments_of(config_name: str, folder: str) -> dict[str, str]:
    """Return the comment above each key of the files that a configuration is composed of; Hydra is set up."""
    loader = GlobalHydra.instance().config_loader()
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
