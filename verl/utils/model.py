"""Helpers around transformers models: positions, auto classes, configurations and inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class CausalLMOutputForPPO(CausalLMOutputWithPast):
    """The output of a head that computes what PPO needs, and no logits."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among those that the mask keeps; 0 before the first."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Return a random (B, L) mask: left padding, one run of tokens, right padding.

    Raises: ValueError unless 0 <= min <= max <= 1 and there is room for the padding.
    """
    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 or not 0 <= max_ratio_of_left_padding < 1:
        raise ValueError(
            f"ratios must satisfy 0 <= min <= max <= 1 and 0 <= left < 1, got min {min_ratio_of_valid_token}, "
            f"max {max_ratio_of_valid_token}, left {max_ratio_of_left_padding}"
        )
    rows, length = input_ids.shape
    left = (torch.rand(rows) * max_ratio_of_left_padding * length).long()
    low, high = int(min_ratio_of_valid_token * length), int(max_ratio_of_valid_token * length)
    valid = torch.minimum(torch.randint(max(low, 1), max(high, 1) + 1, (rows,)), length - left)
    column = torch.arange(length).expand(rows, length)
    mask = (column >= left.unsqueeze(1)) & (column < (left + valid).unsqueeze(1))
    return mask.to(input_ids)


def extract_multi_modal_inputs(
    batch_data: Sequence[Mapping[str, Any] | None], indices: Sequence[int] | None = None
) -> dict[str, Any]:
    """Join the processor outputs of the rows (or of the rows ``indices``) along dim 0; lists stay lists per row."""
    rows = [batch_data[i] for i in indices] if indices is not None else list(batch_data)
    present = [row for row in rows if row]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in present for name in row):
        values = [row[name] for row in present if row.get(name) is not None]
        as_lists = any("image_bound" in row for row in present)
        if values:
            joined[name] = values if as_lists or not isinstance(values[0], Tensor) else torch.cat(values, dim=0)
    return joined


# Configurations


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set attributes of a configuration in place; mappings update nested configurations."""
    for key, value in override_config_kwargs.items():
        if isinstance(value, Mapping) and hasattr(module_config, key):
            update_model_config(getattr(module_config, key), value)
        else:
            setattr(module_config, key, value)


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a configuration and override some of it."""
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """Load the generation configuration of a checkpoint, or make it from the model's; None when neither is there."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        pass
    try:
        return GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError):  # the latter for a folder without config.json
        return None


def get_hf_auto_model_class(hf_config: PretrainedConfig) -> Any:
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
    if type(hf_config) in AutoModelForCausalLM._model_mapping and not hasattr(hf_config, "vision_config"):
        return AutoModelForCausalLM
    if type(hf_config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    if type(hf_config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    return AutoModel


def get_value_model_class(hf_config: PretrainedConfig) -> Any:
    """Return the auto class of models with one number per token.

    Raises: ValueError where transformers has none for this type.
    """
    if type(hf_config) not in AutoModelForTokenClassification._model_mapping:
        raise ValueError(
            f"transformers has no token classification model for model_type={hf_config.model_type!r}, "
            "which a critic or reward model needs: choose another model.path"
        )
    return AutoModelForTokenClassification


# Figures and names


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Return the number of parameters and its scale: B, M, K or none."""
    count = float(sum(p.numel() for p in model.parameters()))
    scales = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next(name for name, unit in scales.items() if count > unit or name == "")
    if scale not in scales:
        raise ValueError(f"scale must be 'auto', 'B', 'M', 'K' or '', got {scale!r}")
    return count / scales[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Log the number of parameters."""
    import logging

    count, scale = get_model_size(model)
    logging.getLogger(__name__).info("%s holds %.2f%s parameters", name or type(model).__name__, count, scale)


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a configuration that describes the language model."""
    text: PretrainedConfig = config.get_text_config()
    return text


def tied_parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Return target -> source of parameters that are one tensor in this model."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    keys = getattr(model, "all_tied_weights_keys", None) or {}
    return {t: s for t, s in keys.items() if t in by_name and s in by_name and by_name[t] is by_name[s]}
