"""LoRA adapters of the FSDP engine, through peft."""

import json
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.workers.engine.fsdp.weights import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.workers.config import HFModelConfig

ADAPTER_FOLDER = "lora_adapter"
_PREFIX = "base_model.model."
_ADAPTER_NAME = re.compile(r"\.(lora_[AB]|lora_embedding_[AB])(\.default)?(\.weight)?$")


def is_adapter(name: str) -> bool:
    """Whether a parameter name is that of an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str | None:
    """Return the checkpoint name of a parameter under its peft wrappers; None for an adapter's own."""
    if is_adapter(name):
        return None
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else list(value)


def add_adapters(model: "PreTrainedModel", config: "HFModelConfig") -> nn.Module:
    """Wrap the model so that only its adapters train.

    Raises: ValueError when ``target_modules`` match nothing.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_as_list(config.target_modules),
        exclude_modules=_as_list(getattr(config, "exclude_modules", None)),
        bias="none",
        base_model_name_or_path=getattr(config, "path", None),
    )
    model.enable_input_require_grads()
    try:
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ValueError(f"model.target_modules={config.target_modules!r}: {error}") from error
