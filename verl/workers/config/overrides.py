"""Changes to a ``config.json``: where each belongs, and which of them would have no effect.

The changes are made to the fields of the file, which transformers then reads as if they stood there: derived fields
follow, and spellings of RoPE scaling of all versions are understood. This imports no torch: the launching process asks.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.base_config import ConfigError, Violation, as_yaml, nearest, one_line
from verl.utils.json_types import Json, mapping_at

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_KEYS = ("rope_scaling", "rope_parameters")
TEXT_NODES = ("text_config", "llm_config", "language_config")
"""Nodes of a vision-language model's ``config.json`` that hold the fields of its language model."""
_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor")
"""Fields that newer files hold within the parameters of RoPE."""
_OF_EVERY_TYPE = (*_ROPE_FIELDS, "mrope_section", "mrope_interleaved")
"""Parameters of RoPE that stay when its type changes."""

_DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "dropout_rate")
_DTYPES = ("dtype", "torch_dtype")
"""The field that a file may have under either name, for the whole model and its parts."""

Fields = dict[str, Json]
Declares = Callable[[str], tuple[bool, bool]]
"""Name of a field -> whether the classes of the language model and of the whole model have it."""


def flat_overrides(override_config: Mapping[str, Json]) -> Fields:
    """Return the fields to set; ``model_config`` is the nesting that Megatron compositions use."""
    flat = {k: v for k, v in override_config.items() if k not in ("model_config", "moe_config", "attn_implementation")}
    return flat | dict(mapping_at(override_config, "model_config"))


def overridden(
    content: Mapping[str, Json], override_config: Mapping[str, Json], declares: Declares | None = None
) -> Fields:
    """Return the fields of a ``config.json`` with changes; mappings are merged.

    A field of the language model goes to its node, if the file has one; a field that both nodes have is changed in
    both. ``declares`` decides about fields that the file leaves out, which otherwise belong to the language model.
    """
    fields = deepcopy(dict(content))
    node = next((name for name in TEXT_NODES if isinstance(fields.get(name), Mapping)), None)
    rope: Fields = {}
    for name, value in flat_overrides(override_config).items():
        if name in (*ROPE_KEYS, *_ROPE_FIELDS):
            rope[name] = deepcopy(value)
        elif name in TEXT_NODES and isinstance(value, Mapping) and name not in fields and "vision_config" in fields:
            fields = overridden(fields, value)  # an older config.json, with the text model's fields at the top level
        elif isinstance(value, Mapping) and isinstance(inner := fields.get(name), Mapping):
            fields[name] = overridden(inner, value)
        elif name in _DTYPES:
            for place in [fields] if node is None else [fields, _own(fields, node)]:
                place.update({each: value for each in _DTYPES if each in place} or {"dtype": value})
        else:
            of_text, of_whole = (False, False) if declares is None else declares(name)
            in_whole = name in fields or (of_whole and node is not None)
            in_text = node is not None and (name in mapping_at(fields, node) or of_text or not in_whole)
            if node is not None and in_text:
                fields[node] = {**mapping_at(fields, node), name: deepcopy(value)}
            if in_whole or not in_text:
                fields[name] = deepcopy(value)
    if rope:
        places = [fields] if node is None or any(name in fields for name in rope) else []
        for place in [*places, *([] if node is None else [_own(fields, node)])]:
            _set_rope(place, rope)
    return fields


def _own(fields: Fields, node: str) -> Fields:
    """Return a node of ``fields`` to write to."""
    own = fields[node] = dict(mapping_at(fields, node))
    return own


def _set_rope(fields: Fields, changes: Mapping[str, Json]) -> None:
    """Change base, scaled share and parameters of RoPE, in the spelling of the file."""
    key = next((name for name in ROPE_KEYS if fields.get(name)), None)
    current = fields.get(key) if key is not None else None
    old: Fields = dict(current) if isinstance(current, Mapping) else {}
    layers = [name for name, value in old.items() if isinstance(value, Mapping)]
    for name, value in changes.items():
        by_layer = isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values())
        if layers and value is not None and not by_layer:
            continue  # refused by ``override_problems``
        if isinstance(value, Mapping):
            for layer in value if by_layer else ():
                value = {**value, layer: _merged_rope(mapping_at(old, layer), mapping_at(value, layer))}
            old = {**old, **value} if by_layer else _merged_rope(old, value)
            key = key or ("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
        elif name in ROPE_KEYS:  # null: no scaling
            old = {name: old[name] for name in _OF_EVERY_TYPE if name in old}
            old |= {"rope_type": "default"} if old else {}
            key = key or name
        elif name in old:
            old[name] = value
        else:
            fields[name] = value
    if key is not None:
        for other in ROPE_KEYS:
            fields.pop(other, None)
        fields[key] = old or None


def _merged_rope(old: Mapping[str, Json], new: Mapping[str, Json]) -> Fields:
    """Apply changes to RoPE parameters; a new type drops the old type's. ``type`` is an older name of ``rope_type``."""
    merged, changed = (dict(each) for each in (old, new))
    for each in (merged, changed):
        if (kind := each.pop("type", None)) is not None:
            each.setdefault("rope_type", kind)
    before = merged.get("rope_type", "default")
    after = changed.get("rope_type", before)
    if len({"default" if kind == "mrope" else kind for kind in (before, after)}) > 1:
        kept = _OF_EVERY_TYPE if after == "default" else (*_OF_EVERY_TYPE, "original_max_position_embeddings")
        merged = {name: value for name, value in merged.items() if name in kept}
    return merged | changed


# ---- changes without effect


def override_problems(content: Mapping[str, Json], override_config: Mapping[str, Json]) -> Iterator[str]:
    """Yield changes that could not have an effect, as the end of a sentence about ``override_config``.

    No code of the model in transformers names the field: its source is searched, since importing it takes seconds. Or
    the model has one RoPE for each kind of layer. The code of a repository may read anything.
    """
    changes = flat_overrides(override_config)
    for name in mapping_at(override_config, "moe_config"):
        if name != "freeze_moe_router":
            yield f"names moe_config.{name}, which nothing reads: write moe_config.freeze_moe_router, or leave it out"
    text = content.get(next((name for name in TEXT_NODES if name in content), ""))
    own: Mapping[str, Json] = text if isinstance(text, Mapping) else content
    old = next((each for name in ROPE_KEYS if isinstance(each := own.get(name), Mapping)), {})
    layers = [name for name, value in old.items() if isinstance(value, Mapping)]
    for name in (*ROPE_KEYS, *_ROPE_FIELDS) if layers else ():
        value = changes.get(name)
        values = value.values() if isinstance(value, Mapping) else ()
        if value is not None and not any(isinstance(each, Mapping) for each in values):
            example = f"rope_parameters={{{layers[0]}: {{{'rope_theta: 1.0e6' if name in _ROPE_FIELDS else '...'}}}}}"
            yield f"names {name}, and the model has one RoPE for each kind of layer: write {example}"
    nodes = [content, *(each for each in content.values() if isinstance(each, Mapping) and "model_type" in each)]
    found = [_words_of(str(each.get("model_type"))) for each in nodes]
    if content.get("auto_map") or any(each is None for each in found):
        return
    words = frozenset[str]().union(*(each for each in found if each is not None))
    yield from (f"names {each}" for each in _unknown(words, content, changes, ""))
    switch = {**own, **changes}.get("use_sliding_window")
    if changes.get("sliding_window") and "use_sliding_window" in words and not switch:
        yield "names sliding_window, which needs use_sliding_window=true"


def _unknown(words: frozenset[str], fields: Mapping[str, Json], changes: Mapping[str, Json], at: str) -> Iterator[str]:
    text = fields.get(next((name for name in TEXT_NODES if name in fields), ""))
    known = {**fields, **(text if isinstance(text, Mapping) else {})}
    for name, value in changes.items():
        if name in ("model_type", "transformers_version"):
            yield f"{at}{name}, which says what the files are: change it there"
        elif isinstance(value, Mapping) and name.endswith("_config"):
            inner = fields.get(name)
            if inner is None and not (name in TEXT_NODES and "vision_config" in fields):
                yield f"{at}{name}, and the model has no such node"
                continue
            yield from _unknown(words, inner if isinstance(inner, Mapping) else fields, value, f"{at}{name}.")
        elif name in (*ROPE_KEYS, *_ROPE_FIELDS) and words & {*ROPE_KEYS, *_ROPE_FIELDS}:
            continue
        elif value == 0 and name.endswith(_DROPOUTS):
            continue  # a model without the field drops nothing either
        elif name not in words and name not in known:
            similar = nearest(name, known)
            yield f"{at}{name}, which the model does not read" + (f": {' or '.join(similar)}?" if similar else "")


@cache
def _words_of(model_type: str) -> frozenset[str] | None:
    """Return the identifiers in a family's code and the fields that all families have; None for an unknown family."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(found.submodule_search_locations[0])
    name = model_type.replace("-", "_")
    names = (name, re.sub("_(text|vision|language)(_model)?$", "", name))
    folder = next((root / "models" / each for each in names if (root / "models" / each).is_dir()), None)
    if folder is None:
        return None
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    common = (root / "configuration_utils.py").read_text(encoding="utf-8")
    words = {*re.findall(r"\w+", source), *re.findall(r"^    (?:def )?(\w+)(?::|\(self\))", common, re.MULTILINE)}
    for other in set(re.findall(r"^from \.\.(\w+)\.?\w* import \w*Config", source, re.MULTILINE)) - {"auto", name}:
        words |= _words_of(other) or set()
    return frozenset(words) | {"torch_dtype"}


# ---- the configuration of transformers


def changed_config(
    base: "PretrainedConfig", content: Mapping[str, Json], override_config: Mapping[str, Json], **options: Json
) -> "PretrainedConfig":
    """Return the configuration that transformers reads from a ``config.json`` with changes.

    Args: ``base`` is the one that it reads without them; ``options`` are those of ``from_pretrained``.
    Raises: ConfigError naming the changes that it refuses, that no code reads, or that have no effect.
    """
    from huggingface_hub.errors import StrictDataclassError

    changes = flat_overrides(override_config)
    _refuse(changes, override_problems(content, override_config))
    text = base.get_text_config()
    _refuse(changes, _of_no_layer(text, changes))

    def declares(name: str) -> tuple[bool, bool]:
        return _has_field(text, name), _has_field(base, name)

    fields = overridden(_without_derived(base, content, changes), override_config, declares)
    try:
        config = type(base).from_dict(fields, **options)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = one_line(str(error), 400)
        _refuse(changes, [f"makes a config.json that transformers refuses: {reason}"], error)
    config.name_or_path = base.name_or_path
    _refuse(changes, (f"has no effect on {each}" for each in _without_effect(config, changes)))
    return config


def _refuse(changes: Fields, problems: Iterator[str] | list[str], cause: Exception | None = None) -> None:
    found = [Violation("model.override_config", as_yaml(changes), each) for each in problems]
    if found:
        raise ConfigError(found[:1]) from cause


def _has_field(config: "PretrainedConfig", name: str) -> bool:
    """Return whether a configuration defines a field that not all configurations have."""
    from transformers import PretrainedConfig

    common = vars(PretrainedConfig()).keys()
    return name not in common and (name in vars(config) or name in config.attribute_map)


def _without_derived(base: "PretrainedConfig", content: Mapping[str, Json], changes: Fields) -> Fields:
    """Return a ``config.json`` without lists of a value for each layer that its class derives from other fields.

    Files hold them since transformers 4.53, and a change of what they follow from would not reach the model.
    """
    fields = deepcopy(dict(content))
    node = next((name for name in TEXT_NODES if isinstance(fields.get(name), Mapping)), None)
    own = fields if node is None else _own(fields, node)
    text: Any = base.get_text_config()
    layers = own.get("num_hidden_layers")
    per_layer = [name for name, value in own.items() if isinstance(value, list) and len(value) == layers]
    given = {*changes, *(name for value in changes.values() if isinstance(value, Mapping) for name in value)}
    for name in per_layer:
        if name in given or not type(text).__module__.startswith("transformers."):
            continue
        rest = {key: value for key, value in deepcopy(own).items() if key not in (name, "model_type")}
        if getattr(type(text)(**rest), name, None) == getattr(text, name, None):
            own.pop(name)
    return fields


def _of_no_layer(text: "PretrainedConfig", changes: Mapping[str, Json]) -> Iterator[str]:
    """Yield RoPE parameters by kind of layer that are given for a model with one RoPE for all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer = any(isinstance(each, Mapping) for each in parameters.values())
    for name in ROPE_KEYS:
        value = changes.get(name)
        layers = [key for key, each in value.items() if isinstance(each, Mapping)] if isinstance(value, Mapping) else []
        if layers and not by_layer:
            yield f"names {name}.{layers[0]}, and the model has one RoPE for all layers: write its parameters directly"


def _without_effect(config: "PretrainedConfig", changes: Mapping[str, Json]) -> Iterator[str]:
    """Yield changes that a configuration does not hold, as the end of a sentence."""
    for name, value in changes.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and inner is not None and hasattr(inner, "to_dict"):
            yield from _without_effect(inner, value)
        elif isinstance(value, Mapping) or name in (*ROPE_KEYS, *_ROPE_FIELDS, "dtype", "torch_dtype"):
            continue
        else:
            places = [each for each in (config, config.get_text_config()) if hasattr(each, name)]
            held = [getattr(each, name) for each in places]
            if held and all(_plain(each) != _plain(value) for each in held):
                yield f"{name}: transformers makes it {one_line(str(held[-1]))}"


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


def config_changes(before: Mapping[str, Json], after: Mapping[str, Json]) -> Fields:
    """Return the differences between two configurations as mappings; nested nodes are compared by field."""
    changes: Fields = {}
    for name, value in after.items():
        old = before.get(name)
        if name.endswith("_config") and isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := config_changes(old, value):
                changes[name] = inner
        elif name not in before or old != value:
            changes[name] = value
    return changes


def merged(fields: Mapping[str, Json], changes: Mapping[str, Json]) -> Fields:
    """Return fields with changes, whose nodes are merged."""
    result = dict(fields)
    for name, value in changes.items():
        inner = result.get(name)
        is_node = name.endswith("_config") and isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[name] = merged(mapping_at(result, name), mapping_at(changes, name)) if is_node else value
    return result
