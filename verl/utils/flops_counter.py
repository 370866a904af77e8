"""Floating point operations of a training step, and what the device could do."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.device import get_device_name, get_torch_device

logger = logging.getLogger(__name__)

_DENSE = (
    "llama", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_vl", "minicpmv", "minicpmo", "mistral", "seed_oss",
    "glm4v",
)  # fmt: skip
_MOE = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe")

_PROMISED_TFLOPS = (  # the first whose name is part of the device's
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("MI300X", 1336.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("A40", 149.7),
    ("L20", 119.5),
    ("H20", 148.0),
    ("910B", 354.0),
    ("Ascend910", 354.0),
    ("RTX 3070 Ti", 21.75),
)
_CPU_TFLOPS = 0.448


def get_device_flops(device_name: str | None = None) -> float:
    """Return the dense half-precision TFLOP/s that a device promises; infinity for one that is not known."""
    if device_name is None:
        device_name = "cpu" if get_device_name() == "cpu" else get_torch_device().get_device_name()
    if device_name == "cpu":
        return _CPU_TFLOPS
    return next((tflops for part, tflops in _PROMISED_TFLOPS if part in device_name), float("inf"))


def _attention_weights(config: Any) -> int:
    """Count the weights of the projections of a layer."""
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    return int(config.hidden_size * (2 * heads + 2 * kv_heads) * _head_dim(config))


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _embeddings(config: Any) -> int:
    return int(2 * config.vocab_size * config.hidden_size)


def _squares(lengths: Sequence[int], window: int | None = None) -> int:
    """Add up how many positions each token of each sequence is compared with."""
    return sum(length * min(length, window or length) for length in lengths)


def _uniform(config: Any, mlp_weights: int, lengths: Sequence[int], extra_weights: int = 0) -> float:
    """Count a model whose layers are alike and attend to everything: 6 a weight and token, 12 a pair and channel."""
    layers = config.num_hidden_layers
    weights = layers * (mlp_weights + _attention_weights(config) + extra_weights) + _embeddings(config)
    pairs = _squares(lengths) * _head_dim(config) * config.num_attention_heads * layers
    return float(6 * weights * sum(lengths) + 12 * pairs)


def _dense(config: Any, lengths: Sequence[int]) -> float:
    return _uniform(config, 3 * config.hidden_size * config.intermediate_size, lengths)


def _moe(config: Any, lengths: Sequence[int]) -> float:
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    router = config.hidden_size * config.num_experts
    return _uniform(config, config.num_experts_per_tok * expert + router, lengths)


def _apertus(config: Any, lengths: Sequence[int]) -> float:
    mlp = 2 * config.hidden_size * config.intermediate_size
    return _uniform(config, mlp, lengths, extra_weights=2 * _head_dim(config))


def _gemma3(config: Any, lengths: Sequence[int]) -> float:
    """Count layers of which some attend to a window only."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = layers * (mlp + _attention_weights(config)) + _embeddings(config)
    pairs = sum(_squares(lengths, config.sliding_window if kind == "sliding_attention" else None) for kind in kinds)
    return float(6 * weights * sum(lengths) + 12 * pairs * _head_dim(config) * heads)


def _deepseek_v3(config: Any, lengths: Sequence[int]) -> float:
    """Count latent attention, dense first layers, then routed and shared experts."""
    hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = (
        hidden * heads * head_dim if config.q_lora_rank is None else config.q_lora_rank * (hidden + heads * head_dim)
    )
    latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    expand = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    attention = query + latent + expand + heads * config.v_head_dim * hidden
    experts = 3 * hidden * config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)
    sparse = experts + hidden * config.n_routed_experts
    num_dense = config.first_k_dense_replace
    weights = (
        layers * attention
        + num_dense * 3 * hidden * config.intermediate_size
        + (layers - num_dense) * sparse
        + _embeddings(config)
    )
    return float(6 * weights * sum(lengths) + 12 * _squares(lengths) * layers * head_dim * heads)


_FAMILIES: dict[str, Callable[[Any, Sequence[int]], float]] = {
    **dict.fromkeys(_DENSE, _dense),
    **dict.fromkeys(_MOE, _moe),
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "apertus": _apertus,
}


class FlopsCounter:
    """Estimates the work of forward and backward passes of a model by its HF config."""

    def __init__(self, config: Any) -> None:
        kind = config.model_type
        self.estimate = _FAMILIES.get(kind) or _FAMILIES.get(kind.removesuffix("_text"))
        if self.estimate is None:
            logger.warning("FLOPs of model_type %r are not known: its MFU is reported as 0", kind)
        self.config = getattr(config, "text_config", None) or config

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float]:
        """Return (achieved, promised) TFLOP/s for sequences of these lengths trained on in ``delta_time`` seconds.

        A pass without gradient does a third of that work.
        """
        promised = get_device_flops()
        if self.estimate is None or delta_time <= 0:
            return 0.0, promised
        return self.estimate(self.config, batch_seqlens) / delta_time / 1e12, promised
