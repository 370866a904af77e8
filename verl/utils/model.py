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

from verl.utils.fs import copy_to_local
from verl.utils.hub import model_folder
from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import Json
from verl.utils.value_heads import HEAD_NAME, stored_head

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

logger = logging.getLogger(__name__)

VISION_TOWERS = ("visual", "vision_tower", "vpm")
"""Names of the vision tower in a model: of the Qwen-VL family, Kimi-VL and MiniCPM-o."""
_ABOVE = ("load_mcore_dist_weights", "load_megatron_gptmodel_weights")
"""Established names whose code needs the model families; it lives in the layer above."""


__getattr__ = lazy_exports(__name__, dict.fromkeys(_ABOVE, "verl.models.mcore.modules"))


@dataclass
class CausalLMOutputForPPO(CausalLMOutputWithPast):
    """The output of a fused head: log-probabilities and entropy instead of logits."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among the unmasked tokens; 0 before the first."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Return a random (B, L) mask: left padding, one run of tokens, right padding.

    Raises: ValueError unless 0 <= min <= max <= 1 and 0 <= left < 1.
    """
    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 or not 0 <= max_ratio_of_left_padding < 1:
        raise ValueError(
            f"ratios must satisfy 0 <= min <= max <= 1 and 0 <= left < 1, got min {min_ratio_of_valid_token}, "
            f"max {max_ratio_of_valid_token}, left {max_ratio_of_left_padding}"
        )
    rows, length = input_ids.shape
    left = (torch.rand(rows) * max_ratio_of_left_padding * length).long()
    low = int(min_ratio_of_valid_token * length)
    high = int(max_ratio_of_valid_token * length)
    valid = torch.minimum(torch.randint(max(low, 1), max(high, 1) + 1, (rows,)), length - left)
    column = torch.arange(length).expand(rows, length)
    mask = (column >= left.unsqueeze(1)) & (column < (left + valid).unsqueeze(1))
    return mask.to(input_ids)


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
    """Pad tensors to the largest size of each dim but the first; those of several ranks stay as they are."""
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

    What a vision-language model has in its language model only is set there.
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


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, Json] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a configuration and override some of its attributes."""
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Load the generation configuration of a checkpoint, or derive it from the model's; None if both are missing."""
    with suppress(OSError):
        return GenerationConfig.from_pretrained(model)
    with suppress(OSError, ValueError):  # ValueError: a folder without config.json
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(config)
    return None


def get_hf_model_path(config: Any, local_cache_path: str | None = None) -> str:
    """Return the local folder of ``config.model.path``, after a copy if it is remote or ``model.use_shm`` is set."""
    return copy_to_local(
        model_folder(config.model.path), cache_dir=local_cache_path, use_shm=bool(config.model.get("use_shm"))
    )


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
    """Return the configuration of the model with one number per token that has the body of another one.

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
    if renames is not None:  # transformers maps names in files to names in memory by class name
        conversion_mapping.register_checkpoint_conversion_mapping(name, renames, overwrite=True)
    return VisionTokenClassification


def create_huggingface_actor(
    model_name: str,
    override_config_kwargs: Mapping[str, Json] | None = None,
    automodel_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build a policy with new weights from the configuration of a checkpoint."""
    options = dict(automodel_kwargs or {})
    config = get_huggingface_actor_config(model_name, override_config_kwargs, options.get("trust_remote_code", False))
    return get_hf_auto_model_class(config).from_config(config, **options)


def create_huggingface_critic(
    model_name: str,
    override_config_kwargs: Mapping[str, Json] | None = None,
    automodel_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build a value model, one number per token, with new weights from the configuration of a checkpoint.

    Raises: ValueError if transformers has no such model of this type.
    """
    options = dict(automodel_kwargs or {})
    changes = {"num_labels": 1, **(override_config_kwargs or {})}
    config = get_huggingface_actor_config(model_name, changes, options.get("trust_remote_code", False))
    return get_value_model_class(config).from_config(config, **options)


def load_valuehead_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a value model, one number per token; a head that the checkpoint lacks gets new weights, with a notice.

    Raises: ValueError if transformers has no such model of this type, if the checkpoint lacks another tensor, and if it
        holds a head under another name.
    """
    model_config.num_labels = 1
    options = {"dtype": torch_dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    loaded: Any = get_value_model_class(model_config).from_pretrained(local_path, config=model_config, **options)
    model, report = loaded  # two values, because of output_loading_info
    missing = set(report["missing_keys"])
    if lacking := sorted(name for name in missing if not name.startswith(f"{HEAD_NAME}.")):
        raise ValueError(f"{local_path}: lacks {len(lacking)} tensors of the model, the first is {lacking[0]!r}")
    if f"{HEAD_NAME}.weight" in missing:
        if head := stored_head(report["unexpected_keys"]):
            raise ValueError(f"{local_path}: holds its value head as {head}.weight: rename it to {HEAD_NAME}.weight")
        logger.warning("%s holds no value head: a new one starts at random", local_path)
    value_model: PreTrainedModel = model
    return value_model


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


def convert_weight_keys(state_dict: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return in-memory tensors under the names and in the layout of the files that ``save_pretrained`` writes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        return state_dict
    return revert_weight_conversion(model, state_dict)


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Return the number of parameters and its unit: B, M, K or none."""
    count = float(sum(p.numel() for p in model.parameters()))
    scales = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next(name for name, unit in scales.items() if count > unit or name == "")
    if scale not in scales:
        raise ValueError(f"scale must be 'auto', 'B', 'M', 'K' or '', got {scale!r}")
    return count / scales[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Log the number of parameters."""
    count, scale = get_model_size(model)
    logger.info("%s has %.2f%s parameters", name or type(model).__name__, count, scale)
