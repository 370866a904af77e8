"""Values of a model's configuration that its forward reads: other values for the same weights are another model."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
