"""Helpers under the established names of ``verl.utils.model``, for recipes and workers of users' forks."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.utils.fs import copy_to_local
from verl.utils.hub import model_folder
from verl.utils.json_types import Json
from verl.utils.model import get_hf_auto_model_class, get_value_model_class, update_model_config
from verl.utils.value_heads import HEAD_NAME, stored_head

logger = logging.getLogger(__name__)


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


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: Mapping[str, Json] | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Load a configuration and override some of its attributes."""
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, override_config_kwargs or {})
    return config


def get_hf_model_path(config: Any, local_cache_path: str | None = None) -> str:
    """Return the local folder of ``config.model.path``, after a copy if it is remote or ``model.use_shm`` is set."""
    return copy_to_local(
        model_folder(config.model.path), cache_dir=local_cache_path, use_shm=bool(config.model.get("use_shm"))
    )


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
