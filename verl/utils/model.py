"""Helpers for transformers models: position ids, auto classes, configurations and inputs."""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, TokenClassifierOutput

from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)

VISION_TOWERS = ("visual", "vision_tower", "vpm")
"""Names of the vision tower in a model: of the Qwen-VL family, Kimi-VL and MiniCPM-o."""
_ABOVE = ("load_mcore_dist_weights", "load_megatron_gptmodel_weights")
"""Established names whose code needs the model families; it lives in the layer above."""


_FOR_FORKS = (
    "compute_position_id_with_mask",
    "create_random_mask",
    "get_huggingface_actor_config",
    "get_hf_model_path",
    "create_huggingface_actor",
    "create_huggingface_critic",
    "load_valuehead_model",
    "convert_weight_keys",
    "get_model_size",
    "print_model_size",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(
    __name__, dict.fromkeys(_ABOVE, "verl.models.mcore.modules") | dict.fromkeys(_FOR_FORKS, "verl.compat.model")
)


@dataclass
class CausalLMOutputForPPO(CausalLMOutputWithPast):
    """The output of a fused head: log-probabilities and entropy instead of logits."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, Any] | None], indices: Sequence[int] | None = None
) -> dict[str, Any]:
    """Concatenate the processor outputs of all rows, or of ``indices``, along dim 0; other values become lists.

    Images of several shapes are padded with zeros at the end, as processors do with those that they get together.
    """
    rows = [batch_data[i] for i in indices] if indices is not None else list(batch_data)
    present = [row for row in rows if row]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in present for name in row):
        values = [row[name] for row in present if row.get(name) is not None]
        as_lists = any("image_bound" in row for row in present)
        if values:
            joined[name] = values if as_lists or not isinstance(values[0], Tensor) else torch.cat(_padded(values))
    return joined


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pad tensors to the largest size of each dim except the first; leave tensors of several ranks unchanged."""
    sizes = [max(dims) for dims in zip(*(each.shape[1:] for each in tensors), strict=False)]
    if any(each.dim() != tensors[0].dim() for each in tensors) or all(
        list(each.shape[1:]) == sizes for each in tensors
    ):
        return list(tensors)
    missing = ([wide - own for wide, own in zip(sizes, each.shape[1:], strict=True)] for each in tensors)
    pads = ([side for size in reversed(sizes_missing) for side in (0, size)] for sizes_missing in missing)
    return [F.pad(each, pad) for each, pad in zip(tensors, pads, strict=True)]


# ---- configurations


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Json]) -> None:
    """Set attributes of a configuration in place; mappings update nested configurations and are merged into others.

    A setting that a vision-language model has in its language model only is set there.
    """
    text = module_config.get_text_config()
    for key, value in override_config_kwargs.items():
        owner = module_config if hasattr(module_config, key) else text
        old = getattr(owner, key, None)
        if isinstance(value, Mapping) and isinstance(old, PretrainedConfig):
            update_model_config(old, value)
        elif key == "rope_theta" and isinstance(getattr(text, "rope_parameters", None), dict):
            text.rope_parameters = {**text.rope_parameters, key: value}
        else:
            setattr(owner, key, {**old, **value} if isinstance(value, Mapping) and isinstance(old, dict) else value)


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Load the generation configuration of a checkpoint, or derive it from the model's; None if both are missing."""
    with suppress(OSError):
        return GenerationConfig.from_pretrained(model)
    with suppress(OSError, ValueError):  # ValueError: a folder without config.json
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(config)
    return None


def get_hf_auto_model_class(hf_config: PretrainedConfig) -> "type[_BaseAutoModelClass]":
    """Choose the auto class of a configuration: by ``auto_map`` for remote code, else vision-language, else causal."""
    from transformers import AutoModel

    auto_map = getattr(hf_config, "auto_map", None) or {}
    by_name = {
        "AutoModelForImageTextToText": AutoModelForImageTextToText,
        "AutoModelForVision2Seq": AutoModelForImageTextToText,
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }
    for name, cls in by_name.items():
        if name in auto_map:
            return cls
    is_causal = type(hf_config) in AutoModelForCausalLM._model_mapping
    if type(hf_config) in AutoModelForImageTextToText._model_mapping:
        if not is_causal or hasattr(hf_config, "vision_config"):
            return AutoModelForImageTextToText
    return AutoModelForCausalLM if is_causal else AutoModel


def get_value_model_class(hf_config: PretrainedConfig) -> "type[_BaseAutoModelClass] | VisionValueModel":
    """Return the auto class of models with one number per token, or its vision-language substitute.

    Raises: ValueError if transformers has neither for this model type.
    """
    if type(hf_config) not in AutoModelForTokenClassification._model_mapping:
        if type(hf_config) in AutoModelForImageTextToText._model_mapping:
            return VisionValueModel(hf_config)
        raise ValueError(
            f"transformers has no token classification model for model_type={hf_config.model_type!r}, "
            "which a critic or reward model needs: set another model.path"
        )
    return AutoModelForTokenClassification


def value_model_config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the value model (one number per token) with the body of another model.

    Raises: ValueError if transformers has no such model of this type.
    """
    config = copy.deepcopy(hf_config)
    mapping = get_value_model_class(config)._model_mapping or {}
    config.architectures = [mapping[type(config)].__name__]
    config.num_labels = 1
    return config


class VisionValueModel:
    """Build a vision-language model with one number per token; it has the two constructors of an auto class.

    transformers has no token classification class for these architectures.
    """

    def __init__(self, hf_config: PretrainedConfig) -> None:
        self._class = _with_score(AutoModelForImageTextToText._model_mapping[type(hf_config)])
        self._model_mapping = {type(hf_config): self._class}

    def from_config(self, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return the model with new weights."""
        return self._class._from_config(config, **options)

    def from_pretrained(self, path: str, **options: Any) -> PreTrainedModel:
        """Return the model with the weights of a checkpoint, possibly of a policy."""
        return self._class.from_pretrained(path, **options)


@cache
def _with_score(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of an architecture with a head ``score`` that gives one number per token."""
    from transformers import conversion_mapping

    class VisionTokenClassification(architecture):  # type: ignore[misc, valid-type]
        _tied_weights_keys = None

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels or 1)

        def get_output_embeddings(self) -> None:
            """Return None: there is no language-model head."""

        def forward(
            self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
        ) -> TokenClassifierOutput:
            """Score every token: logits (b, L, 1)."""
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)[0]
            return TokenClassifierOutput(logits=self.score(hidden))

    name = architecture.__name__.replace("ForConditionalGeneration", "") + "ForTokenClassification"
    VisionTokenClassification.__name__ = VisionTokenClassification.__qualname__ = name
    renames = conversion_mapping.get_checkpoint_conversion_mapping(architecture.__name__)
    if renames is not None:  # transformers finds the mapping of weight names by the class name
        conversion_mapping.register_checkpoint_conversion_mapping(name, renames, overwrite=True)
    return VisionTokenClassification


def get_vl_model_vision_tower(vl_model_instance: nn.Module) -> nn.Module | None:
    """Return the vision tower of a vision-language model, or None."""
    for owner in (getattr(vl_model_instance, "model", None), vl_model_instance):
        for name in VISION_TOWERS:
            tower = getattr(owner, name, None)
            if isinstance(tower, nn.Module):
                return tower
    return None


# ---- adapters


def check_target_modules(config: "LoraConfig", key: str) -> bool:
    """Whether a LoRA configuration adapts the module ``key``."""
    return is_named(config.target_modules, key)


def check_exclude_modules(config: "LoraConfig", key: str) -> bool:
    """Whether a LoRA configuration excludes the module ``key``."""
    return is_named(getattr(config, "exclude_modules", None), key)


def is_named(names: str | Iterable[str] | None, key: str) -> bool:
    """Whether a pattern matches all of ``key``, or ``key`` equals or ends in one of several names."""
    if isinstance(names, str):
        return re.fullmatch(names, key) is not None
    return any(key == name or key.endswith(f".{name}") for name in names or ())


# ---- sizes and names


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the buffers that checkpoints hold, such as the bias of a router."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def prediction_layer_names(names: Iterable[str], config: PretrainedConfig) -> set[str]:
    """Return the names of tensors of multi-token prediction layers, which follow the last layer in a checkpoint.

    transformers and the engines of verl leave these layers out.
    """
    first = config.num_hidden_layers
    layers = range(first, first + (getattr(config, "num_nextn_predict_layers", None) or 0))
    starts = tuple(f"model.layers.{layer}." for layer in layers)
    return {name for name in names if name.startswith(starts)}
