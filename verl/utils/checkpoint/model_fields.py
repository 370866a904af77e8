"""Values of a model's configuration that its forward reads: other values for the same weights are another model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.files import layout_file

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
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_max_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    }
)
"""Fields that no forward of the engines reads, or that other keys decide."""
_ROPE = "rope_parameters"
_ROPE_FIELDS = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor", "type": "rope_type"}
"""Older names of the parameters of RoPE, and those under ``rope_parameters``."""
_POSITIONS = "max_position_embeddings"
_PLAIN_ROPES = ("default", None)


def forward_fields(model: Any, config: Any) -> dict[str, Any]:
    """Return the values that the forward of a transformers model reads, by dotted name; empty for other models.

    Args: ``model`` may hold adapters, whose scale belongs to the values.
    """
    if not hasattr(config, "to_json_string"):
        return {}
    content = dict(_leaves(json.loads(config.to_json_string(use_diff=False))))
    ropes = {value for name, value in content.items() if name.rpartition(".")[2] in ("rope_type", "type")}
    if ropes <= set(_PLAIN_ROPES):  # rotary positions that are not scaled have no limit
        content = {name: value for name, value in content.items() if name.rpartition(".")[2] != _POSITIONS}
    for adapter in getattr(model, "peft_config", {}).values():
        content["lora_alpha"] = adapter.lora_alpha
    return content


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if name in _UNREAD or name.startswith("_"):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def fields_problem(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
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


def start_problem(folder: Path, content: Mapping[str, Any], lora_alpha: float | None = None) -> str | None:
    """Return, before a model is built, how it differs from that of a checkpoint; None if its files do not tell.

    transformers may change a field that it reads, so one counts only if the file in the checkpoint has another value
    too. The engine compares all fields when it loads.

    Args: ``content`` is that of ``config.json`` with the changes of the run; ``lora_alpha`` is None without adapters.
    """
    saved = json.loads(layout_file(folder).read_text(encoding="utf-8")).get(FIELDS_KEY, {})
    copied = Path(folder, "huggingface", "config.json")
    if not copied.is_file():
        return None
    written = _of_file(json.loads(copied.read_text(encoding="utf-8")))
    own = {name: value for name, value in _of_file(content).items() if written.get(name, value) != value}
    if lora_alpha is not None:
        own["lora_alpha"] = lora_alpha
    return fields_problem(saved, own)


def _of_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``config.json`` under the names that transformers gives them."""
    found = {}
    for name, value in _leaves(content):
        node, _, field = name.replace("rope_scaling", _ROPE).rpartition(".")
        if field in _ROPE_FIELDS and (field != "type" or node.endswith(_ROPE)):
            node = node if node.endswith(_ROPE) else f"{node}.{_ROPE}".lstrip(".")
            field = _ROPE_FIELDS[field]
        found[f"{node}.{field}".lstrip(".")] = value
    return found
