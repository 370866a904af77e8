"""Values of a model's configuration that its forward reads: other values for the same weights are another model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.files import layout_file
from verl.utils.json_types import Json, JsonObject

FIELDS_KEY = "model_fields"
"""Entry of a layout file: the values that the model was trained with."""
_UNREAD = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_max_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "processor_class",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    }
)
"""Fields that no forward of the engines reads, or that other keys decide."""
_ROPE = "rope_parameters"
_ROPE_FIELDS = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor", "type": "rope_type"}
"""Older names of the parameters of RoPE, and the present names under ``rope_parameters``."""
_POSITIONS = "max_position_embeddings"
_ROPES = ("rope_parameters", "rope_scaling")
_UNLIMITED_ROPES = ("default", "mrope", "axial", "linear", "llama3", None)
"""Rotary positions without a limit: their frequencies do not depend on it."""
_LAYERS = "layer_types"
_FOLDED_INTO_LAYERS = ("max_window_layers", "use_sliding_window")
_OF_SHAPES = ("head_dim", "num_key_value_heads")
"""Fields that may be null: the shapes of the weights then give the value."""
_ALIASES = {"swish": "silu", "mrope": "default"}
"""Other names of an activation and of a kind of RoPE."""


def forward_fields(model: Any, config: Any) -> JsonObject:
    """Return the values that the forward of a transformers model reads, by dotted name; empty for other models.

    Args: ``model`` may hold adapters, whose scale belongs to the values.
    """
    if not hasattr(config, "to_json_string"):
        return {}
    content = dict(_leaves(json.loads(config.to_json_string(use_diff=False))))
    for adapter in getattr(model, "peft_config", {}).values():
        content["lora_alpha"] = adapter.lora_alpha
    return content


def _leaves(node: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    unread = _UNREAD | _unread_in(node)
    for name, value in node.items():
        if name in unread or name.startswith("_"):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _ALIASES.get(value, value) if isinstance(value, str) else value


def _unread_in(node: Mapping[str, Json]) -> set[str]:
    """Return the fields of a node that have no effect because of its other fields."""
    unread = {name for name in _OF_SHAPES if node.get(name) is None}
    if set(_rope_types([node.get(name) for name in _ROPES])) <= set(_UNLIMITED_ROPES):
        unread.add(_POSITIONS)
    if _LAYERS in node:
        unread.update(_FOLDED_INTO_LAYERS)
    return unread


def _rope_types(value: Any) -> Iterator[str | None]:
    """Yield the kinds of rotary positions; layers of different kinds have a node each."""
    if isinstance(value, list):
        for part in value:
            yield from _rope_types(part)
    elif isinstance(value, Mapping):
        yield from (value[name] for name in ("rope_type", "type") if name in value)
        yield from _rope_types([part for part in value.values() if isinstance(part, Mapping)])


def fields_problem(saved: Mapping[str, Json], own: Mapping[str, Json]) -> str | None:
    """Return how a configuration differs from the one that a checkpoint was trained with; None if it does not.

    A field that only one of them has may be of another version of transformers, so it forbids nothing.
    """
    other = [name for name in own if name in saved and saved[name] != own[name]]
    if not other:
        return None
    shown = [f"{name}={json.dumps(own[name])}, and {json.dumps(saved[name])} in the checkpoint" for name in other[:3]]
    return (
        f"it belongs to another model: this run's has {'; '.join(shown)}: give the values of the checkpoint in the "
        "config.json of model.path, in model.override_config, or as model.lora_alpha"
    )


def start_problem(folder: Path, content: Mapping[str, Json], lora_alpha: float | None = None) -> str | None:
    """Return how a model that is not built yet differs from the model of a checkpoint; None if no file shows it.

    transformers may change a field that it reads, so a field counts only if its value is the same in the checkpoint's
    ``config.json`` and in the saved fields. The engine compares all fields when it loads.

    Args: ``content`` is ``config.json`` with the changes of the run; ``lora_alpha`` is None without adapters.
    """
    saved = json.loads(layout_file(folder).read_text(encoding="utf-8")).get(FIELDS_KEY, {})
    copied = Path(folder, "huggingface", "config.json")
    if not copied.is_file():
        return None
    written = _of_file(json.loads(copied.read_text(encoding="utf-8")))
    own = {}
    for name, value in _of_file(content).items():
        place = name if name in saved else f"text_config.{name}"  # where transformers reads older files to
        stored = saved.get(place)
        if stored is not None and written.get(name, stored) == stored:
            own[place] = value
    if lora_alpha is not None:
        own["lora_alpha"] = lora_alpha
    return fields_problem(saved, own)


def _of_file(content: Mapping[str, Json]) -> JsonObject:
    """Return the values of a ``config.json`` under the names that transformers gives them."""
    found = {}
    for name, value in _leaves(content):
        node, _, field = name.replace("rope_scaling", _ROPE).rpartition(".")
        if field in _ROPE_FIELDS and (field != "type" or node.endswith(_ROPE)):
            node = node if node.endswith(_ROPE) else f"{node}.{_ROPE}".lstrip(".")
            field = _ROPE_FIELDS[field]
        found[f"{node}.{field}".lstrip(".")] = value
    return found
