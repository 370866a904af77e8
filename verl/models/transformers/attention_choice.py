"""Choose an attention of transformers for padded rows that supports every feature in the model's configuration.

``sdpa`` drops a cap of the logits without a word, and some families have no ``sdpa``, because it has no sinks for
instance. Packed rows have an attention of verl (``verl.models.transformers.attention``).

Works with transformers 5.16 to 5.19, whose model classes say by ``_supports_...`` which attentions they take.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import WrongInput
from verl.models.transformers.packing import attention_cap
from verl.utils.import_utils import has_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_KEY = "model.override_config.attn_implementation"


def padded_attention(
    config: "PretrainedConfig", model_class: Any, device: torch.device, dtype: torch.dtype, asked: str | None
) -> str:
    """Return the attention for padded rows, as transformers names it.

    Args: ``model_class`` is None for code of the model's repository, ``dtype`` is that of the computation, ``asked``
        what ``override_config.attn_implementation`` says.

    Raises: WrongInput for an attention that the model lacks, or that drops what its configuration asks for.
    """
    cap = attention_cap(config.get_text_config().to_dict())
    lacks_sdpa = model_class is not None and not model_class._supports_sdpa
    if asked == "sdpa" and (cap or lacks_sdpa):
        why = f"drops {cap}" if cap else f"is not supported for {model_class.__name__}"
        raise WrongInput(f"{_KEY}=sdpa {why}: leave it out, or write eager")
    if asked is not None:
        return asked
    if not cap and not lacks_sdpa:
        return "sdpa"
    why = cap or f"{model_class.__name__}, which has no sdpa,"
    chosen = "eager"
    if device.type == "cuda" and model_class is not None:
        chosen = _on_gpu(config, model_class, dtype, is_capped=cap is not None and not lacks_sdpa)
    if chosen == "eager":
        _give_notice(why)
    return chosen


def _on_gpu(config: "PretrainedConfig", model_class: Any, dtype: torch.dtype, is_capped: bool) -> str:
    """Return flash attention for capped logits, else flex attention, if supported; sinks need flex attention."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    if is_capped and is_half and model_class._supports_flash_attn and has_module("flash_attn"):
        return "flash_attention_2"
    drops = getattr(config.get_text_config(), "attention_dropout", 0.0)
    return "flex_attention" if model_class._supports_flex_attn and not drops else "eager"


@cache
def _give_notice(why: str) -> None:
    """Log once that attention takes memory for all pairs of tokens."""
    logger.warning(
        "padded rows run with attn_implementation=eager because of %s: attention takes memory for all pairs of tokens "
        "of a row. use_remove_padding=true takes less, if the model can be packed",
        why,
    )


def class_of(auto_class: Any, config: "PretrainedConfig") -> Any:
    """Return the class that an auto class of transformers builds for a configuration; None for remote code."""
    found = getattr(auto_class, "_model_mapping", {}).get(type(config), None)
    return found[0] if isinstance(found, tuple | list) else found
