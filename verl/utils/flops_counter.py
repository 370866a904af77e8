"""FLOPs of a training step, and the peak FLOP/s of devices.

Per token, a matrix of W weights costs 6 W operations, forward and backward. Per pair of positions, attention costs 6
operations for each channel of a query head and 6 for each channel of a value head. All pairs of a sequence count,
including those that a causal mask drops; embedding lookups count nothing.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from verl.utils.device import get_device_name, get_torch_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.utils.vision.multi_modal import RowObject, SharedRow

logger = logging.getLogger(__name__)

_PROMISED_TFLOPS = (  # the first name that is part of the device's name applies
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

Lengths = Sequence[int]
"""Tokens of each text, or patches of each image."""


def get_device_flops(device_name: str | None = None) -> float:
    """Return the peak dense half-precision TFLOP/s of a device; infinity for an unknown device."""
    if device_name is None:
        device_name = "cpu" if get_device_name() == "cpu" else get_torch_device().get_device_name()
    if device_name == "cpu":
        return _CPU_TFLOPS
    return next((tflops for part, tflops in _PROMISED_TFLOPS if part in device_name), float("inf"))


# ---- weights that multiply a token in one layer


def _attention(config: "PretrainedConfig") -> int:
    """Count the projections of queries, keys, values and outputs."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(config.hidden_size * (2 * heads + 2 * kv_heads) * _head_dim(config))


def _latent_attention(config: "PretrainedConfig") -> int:
    """Count the projections of DeepSeek-V3's attention into and out of the latent spaces."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    rank = config.q_lora_rank
    query = hidden * heads * query_dim if rank is None else rank * (hidden + heads * query_dim)
    latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    expand = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return int(query + latent + expand + heads * config.v_head_dim * hidden)


def _head_dim(config: "PretrainedConfig") -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _gated(config: "PretrainedConfig", layer: int) -> int:
    return int(3 * config.hidden_size * config.intermediate_size)


def _ungated(config: "PretrainedConfig", layer: int) -> int:
    return int(2 * config.hidden_size * config.intermediate_size)


def _experts(config: "PretrainedConfig", width: int, experts: int) -> int:
    """Count the experts of a token, and the router."""
    return int(3 * config.hidden_size * config.num_experts_per_tok * width + config.hidden_size * experts)


def _qwen_experts(config: "PretrainedConfig", layer: int) -> int:
    """Count a layer of Qwen2-MoE, which has a gated shared expert, or of Qwen3-MoE; some layers may be dense."""
    dense = layer in (getattr(config, "mlp_only_layers", None) or ())
    if dense or (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1):
        return _gated(config, layer)
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    own = config.hidden_size * (3 * shared + 1) if shared else 0
    return _experts(config, config.moe_intermediate_size, config.num_experts) + int(own)


def _all_experts(config: "PretrainedConfig", layer: int) -> int:
    """Count a layer of Mixtral or gpt-oss, whose experts are as wide as a dense layer."""
    return _experts(config, config.intermediate_size, config.num_local_experts)


def _deepseek_experts(config: "PretrainedConfig", layer: int) -> int:
    """Count a layer of DeepSeek-V3 or GLM-4-MoE: the first ones are dense, the others have shared experts too."""
    if layer < config.first_k_dense_replace:
        return _gated(config, layer)
    shared = 3 * config.hidden_size * config.moe_intermediate_size * (config.n_shared_experts or 0)
    return _experts(config, config.moe_intermediate_size, config.n_routed_experts) + int(shared)


# ---- a whole text model


def _pairs(config: "PretrainedConfig", layer: int, lengths: Iterable[int]) -> int:
    """Count the pairs of positions that a layer compares, within its sliding window if it has one."""
    kinds = getattr(config, "layer_types", None)
    sliding = kinds is not None and layer < len(kinds) and kinds[layer] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if sliding else None
    return sum(length * min(length, window or length) for length in lengths)


@dataclass(frozen=True)
class _Text:
    """The layers of a text model."""

    mlp: Callable[["PretrainedConfig", int], int]
    attention: Callable[["PretrainedConfig"], int] = _attention
    channels: Callable[["PretrainedConfig"], int] = lambda config: 2 * _head_dim(config)


_LATENT = _Text(
    _deepseek_experts,
    _latent_attention,
    lambda config: int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim),
)
_DENSE_FAMILIES = (
    "llama",
    "qwen2",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_vl",
    "minicpmv",
    "minicpmo",
    "mistral",
    "seed_oss",
    "glm4v",
    "gemma",
    "gemma2",
    "gemma3",
)
_FAMILIES: dict[str, _Text] = {
    **dict.fromkeys(_DENSE_FAMILIES, _Text(_gated)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe"), _Text(_qwen_experts)),
    **dict.fromkeys(("mixtral", "gpt_oss"), _Text(_all_experts)),
    "glm4_moe": _Text(_deepseek_experts),
    "deepseek_v3": _LATENT,
    "apertus": _Text(_ungated),
}


# ---- the vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V


def image_lengths(inputs: "Iterable[SharedRow | RowObject | None]") -> list[int]:
    """Return the number of patches of each image and frame in the processor outputs of rows, or in handles to them."""
    lengths: list[int] = []
    for row in inputs:
        for name in ("image_grid_thw", "video_grid_thw"):
            grid = row.get(name) if row else None
            for frames, height, width in [] if grid is None else grid.tolist():
                lengths += [height * width] * frames
    return lengths


def _vision_flops(config: "PretrainedConfig", images: Lengths) -> tuple[float, float, float]:
    """Count the FLOPs of images with the given numbers of patches; zeros for an unknown tower.

    Returns: forward FLOPs, backward FLOPs of the activations, backward FLOPs of the weights. Pixels need no gradient.
    Attention scores have no weights, so their backward FLOPs count as those of activations.
    """
    kind = getattr(config, "model_type", "").removesuffix("_vision")
    if kind not in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"):
        return 0.0, 0.0, 0.0
    patches = sum(images)
    hidden = config.embed_dim if kind == "qwen2_vl" else config.hidden_size
    out = config.hidden_size if kind == "qwen2_vl" else config.out_hidden_size
    pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
    merged = hidden * config.spatial_merge_size**2
    mergers = (1 + len(getattr(config, "deepstack_visual_indexes", None) or ())) * merged * (merged + out)
    if kind == "glm4v":
        mlp = 3 * hidden * out
        mergers = out * (merged + out + 3 * config.intermediate_size)
    elif kind == "qwen2_5_vl":
        mlp = 3 * hidden * config.intermediate_size
    else:
        mlp = 2 * hidden * (hidden * config.mlp_ratio if kind == "qwen2_vl" else config.intermediate_size)
    of_patch = config.depth * (4 * hidden**2 + mlp) + mergers / config.spatial_merge_size**2
    matrices = of_patch * patches
    pixel_matrix = pixels * hidden * patches
    attention = hidden * _patch_pairs(config, images)
    forward = 2.0 * (matrices + pixel_matrix) + 4.0 * attention
    return forward, 2.0 * matrices + 8.0 * attention, 2.0 * (matrices + pixel_matrix)


def _patch_pairs(config: "PretrainedConfig", images: Lengths) -> int:
    """Count the pairs of patches that attention compares, over all layers; most layers of Qwen2.5-VL have windows."""
    every = sum(patches**2 for patches in images)
    whole = getattr(config, "fullatt_block_indexes", None)
    if whole is None:
        return int(config.depth * every)
    merge = config.spatial_merge_size
    window = (config.window_size // merge // config.patch_size) ** 2 * merge**2
    inside = sum(patches * min(patches, window) for patches in images)
    return int(len(whole) * every + (config.depth - len(whole)) * inside)


# ---- the whole model


class AdapterSizes(NamedTuple):
    """The weights of low-rank adapters that a token passes, that a patch passes, and that a merged patch passes."""

    text: int
    tower: int = 0
    mergers: int = 0


class FlopsCounter:
    """Estimate the FLOPs of forward and backward passes from a model's HF config.

    Args:
        num_outputs: width of the head, the vocabulary by default; 1 for a value model.
        frozen_vision: the vision tower has no backward pass.
        adapters: only these are trained. Other weights need no gradient and cost 4 operations instead of 6.
    """

    def __init__(
        self,
        config: "PretrainedConfig",
        num_outputs: int | None = None,
        frozen_vision: bool = False,
        adapters: AdapterSizes | None = None,
    ) -> None:
        kind = config.model_type
        self._text = _FAMILIES.get(kind) or _FAMILIES.get(kind.removesuffix("_text"))
        if self._text is None:
            logger.warning("FLOPs of model_type %r are unknown: its MFU is reported as 0", kind)
        self.config = getattr(config, "text_config", None) or config
        self.vision_config = getattr(config, "vision_config", None)
        self.num_outputs = num_outputs
        self.adapters = adapters
        self.frozen_vision = frozen_vision or (adapters is not None and not adapters.tower + adapters.mergers)

    def estimate_flops(
        self,
        batch_seqlens: Lengths,
        delta_time: float,
        images_seqlens: Lengths = (),
        forward_only: bool = False,
        shared: Lengths = (),
    ) -> tuple[float, float]:
        """Return (achieved, promised) TFLOP/s for training on sequences of these lengths in ``delta_time`` seconds.

        Args:
            images_seqlens: patches of each image and video frame, before merging.
            forward_only: count the forward pass only.
            shared: tokens at the beginning of each sequence that another one has computed; by default none.
        """
        promised = get_device_flops()
        if self._text is None or delta_time <= 0:
            return 0.0, promised
        forward, backward = self._of_text(self._text, batch_seqlens, shared)
        if images_seqlens:
            tower_forward, tower_backward = self._of_tower(images_seqlens)
            forward += tower_forward
            backward += tower_backward
        return (forward if forward_only else forward + backward) / delta_time / 1e12, promised

    def _of_text(self, text: _Text, lengths: Lengths, shared: Lengths) -> tuple[float, float]:
        """Return the operations of the text model, forward and backward."""
        config = self.config
        layers = range(config.num_hidden_layers)
        of_token = sum(text.attention(config) + text.mlp(config, layer) for layer in layers)
        of_token += config.hidden_size * (self.num_outputs or config.vocab_size)
        tokens = sum(lengths) - sum(shared)
        weights = float(of_token * tokens)
        compared = sum(_pairs(config, layer, lengths) - _pairs(config, layer, shared) for layer in layers)
        pairs = float(compared * config.num_attention_heads * text.channels(config))
        if self.adapters is None:
            return 2 * (weights + pairs), 4 * (weights + pairs)
        own = float(self.adapters.text * tokens)
        return 2 * (weights + pairs + own), 2 * weights + 4 * (pairs + own)

    def _of_tower(self, images: Lengths) -> tuple[float, float]:
        """Return the operations of the vision tower, forward and backward."""
        assert self.vision_config is not None
        forward, through, gradients = _vision_flops(self.vision_config, images)
        if self.frozen_vision:
            return forward, 0.0
        if self.adapters is None:
            return forward, through + gradients
        merged = self.adapters.mergers / self.vision_config.spatial_merge_size**2
        own = (self.adapters.tower + merged) * sum(images)
        return forward + 2 * own, through + 4 * own
