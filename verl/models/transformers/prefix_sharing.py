"""Which models may compute the tokens that several rows begin with once.

A shared token must not depend on the row: its layers see nothing but the tokens before it, and draw nothing at random.
This imports no torch: the launching process asks too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.models.transformers.names import REMOTE_FAMILIES
from verl.models.transformers.packing import state_along_rows

_FULL = ("full_attention", "full")


def sharing_problems(config: Mapping[str, Any], trains: bool = True) -> Iterator[str]:
    """Yield why rows of a model cannot share tokens, as the end of a sentence about the key.

    Args: config is that of ``config.json``, ``trains`` whether dropout is on.
    """
    text = {**config, **(config.get("text_config") or {})}
    kind = config.get("model_type")
    if kind in REMOTE_FAMILIES:
        yield f"is not supported for the remote code of model_type={kind!r}: write false"
    rates = {name: rate for name, rate in text.items() if _is_dropout(name) and isinstance(rate, int | float)}
    drops = sorted(name for name, rate in rates.items() if rate > 0)
    if trains and drops:
        yield (
            f"needs {drops[0]}=0.0, it is {text[drops[0]]}: rows that share a token would share its mask. Set it in "
            "override_config, or write false"
        )
    odd = sorted({each for each in text.get("layer_types") or () if each not in _FULL})
    slides = text.get("sliding_window") is not None and text.get("use_sliding_window", True)
    state = state_along_rows(config)
    if state is not None:
        yield f"needs attention in all layers, the model has {state}: write false"
    elif odd:
        yield f"needs full attention in all layers, the model has layers of type {odd[0]}: write false"
    elif slides and not text.get("layer_types"):
        yield f"needs full attention, the model has sliding_window={text['sliding_window']}: write false"
    if text.get("router_aux_loss_coef") and text.get("output_router_logits"):
        yield (
            f"would weigh shared tokens once in the router's auxiliary loss (router_aux_loss_coef="
            f"{text['router_aux_loss_coef']}): set output_router_logits=false in override_config, or write false"
        )


def _is_dropout(name: str) -> bool:
    return name.endswith(("dropout", "dropout_prob", "dropout_rate", "_pdrop")) and "classifier" not in name


def mcore_sharing_problems(
    config: Mapping[str, Any], context_parallel_size: int, use_mbridge: bool, implementation: str = "local"
) -> Iterator[str]:
    """Yield why rows of a model on Megatron-Core cannot share tokens, apart from ``sharing_problems``.

    Args: implementation is whose layers compute, ``local`` or ``transformer_engine``.
    """
    if context_parallel_size > 1:
        yield f"is not supported with megatron.context_parallel_size={context_parallel_size}: write false, or 1"
    if (config.get("text_config") or config).get("kv_lora_rank") is not None:
        yield "is not supported with strategy=megatron for latent attention (kv_lora_rank): write false"
    if use_mbridge:
        yield "is not supported with megatron.use_mbridge=true: write false"
    if implementation != "local":
        yield (
            f"is not supported with the layers of {implementation}: set "
            "megatron.override_transformer_config.transformer_impl=local, or write false"
        )
