"""Settings of ``config.json`` that Megatron-Core cannot compute, by model family, and the choice of its layers.

The families apply these rules to a ``PretrainedConfig``, the launching process to the fields that it has read from the
file, so this module imports neither torch nor Megatron-Core.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from verl.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PretrainedConfig

    Fields = PretrainedConfig | SimpleNamespace

NOT_SUPPORTED = "is not supported with strategy=megatron"


def default_implementation(device: str) -> str:
    """Return ``transformer_engine`` if it is installed and the device is CUDA, else ``local`` for verl's layers."""
    served = device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine" if served else "local"


class Limit(NamedTuple):
    """A field of ``config.json``, its value, and why it is not supported."""

    field: str
    value: Json
    fault: str

    def __str__(self) -> str:
        what = self.field if isinstance(self.value, Mapping) else f"{self.field}={self.value}"
        return f"{what} {self.fault}"


Rule = Callable[["Fields"], Iterator[Limit]]
"""Yields the violated limits of a configuration; absent attributes violate none."""


def dense_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of every layer."""
    if window := getattr(hf, "use_sliding_window", False):
        yield Limit("use_sliding_window", window, NOT_SUPPORTED)
    others = sorted({str(kind) for kind in getattr(hf, "layer_types", None) or () if kind != "full_attention"})
    if others:
        yield Limit("layer_types", hf.layer_types, f"{NOT_SUPPORTED}: it knows full_attention, not {others[0]}")
    if hf.hidden_act != "silu":
        yield Limit("hidden_act", hf.hidden_act, f"{NOT_SUPPORTED}: it knows silu")


def bias_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield MLP biases in a model without attention biases."""
    if getattr(hf, "mlp_bias", False) and not getattr(hf, "attention_bias", False):
        yield Limit("mlp_bias", True, f"without attention_bias {NOT_SUPPORTED}")


def expert_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of expert layers whose router normalises if ``norm_topk_prob`` says so."""
    if window := getattr(hf, "sliding_window", None):
        yield Limit("sliding_window", window, NOT_SUPPORTED)
    yield from _noise_limits(hf)
    if getattr(hf, "norm_topk_prob", False):
        yield from _lone_expert_limits(hf)


def mixtral_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of expert layers whose router always normalises, and whose window has no switch."""
    window = getattr(hf, "sliding_window", None)
    if window is not None:
        yield Limit("sliding_window", window, NOT_SUPPORTED)
    yield from _noise_limits(hf)
    yield from _lone_expert_limits(hf)


def _noise_limits(hf: "Fields") -> Iterator[Limit]:
    if noise := getattr(hf, "router_jitter_noise", 0.0):
        yield Limit("router_jitter_noise", noise, f"{NOT_SUPPORTED}: set it to 0.0 in model.override_config")


def _lone_expert_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield one expert per token with a normalising router: its weight is 1, but Megatron-Core uses its score."""
    if getattr(hf, "num_experts_per_tok", None) == 1:
        fault = f"with a normalised weight (norm_topk_prob) {NOT_SUPPORTED}, which normalises those of several experts"
        yield Limit("num_experts_per_tok", 1, fault)


def rope_of(hf: "Fields") -> JsonObject:
    """Return the rotary position parameters."""
    rope = getattr(hf, "rope_parameters", None)
    return dict(rope) if isinstance(rope, Mapping) else {}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of this scaling in Megatron-Core."""


def rope_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of rotary positions."""
    part = rope_of(hf).get("partial_rotary_factor")
    if part not in (None, 1):  # transformers ignores it for unscaled positions
        yield Limit("partial_rotary_factor", part, NOT_SUPPORTED)
    yield from scaling_limits(hf)


def scaling_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of RoPE scaling, where RoPE may cover a part of each head."""
    rope = rope_of(hf)
    kind = rope.get("rope_type", "default")
    other = {name: rope.get(name) for name, value in LLAMA3.items() if rope.get(name) != value}
    if kind == "llama3" and other:
        yield Limit("rope_scaling", rope, f"of type llama3 with {other} {NOT_SUPPORTED}, which has {LLAMA3}")
    elif kind not in ("default", "linear", "llama3"):
        yield Limit("rope_scaling", rope, f"of type {kind} {NOT_SUPPORTED}: it knows default, linear and llama3")


def vision_rope_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of rotary positions with the three axes of a vision-language model."""
    rope = rope_of(hf)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "mrope"):  # mrope is an older name of default
        yield Limit("rope_scaling", rope, f"of type {kind} {NOT_SUPPORTED} for this model, which knows default")


def latent_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of latent attention and of its rotary positions."""
    if getattr(hf, "attention_bias", False):
        yield Limit("attention_bias", True, f"{NOT_SUPPORTED} for this model")
    if not getattr(hf, "rope_interleave", True):
        yield Limit("rope_interleave", False, f"{NOT_SUPPORTED} for this model")
    rope = rope_of(hf)
    kind = rope.get("rope_type", "default")
    scale_all = rope.get("mscale_all_dim")
    if kind not in ("default", "yarn"):
        fault = f"of type {kind} {NOT_SUPPORTED} for this model, which knows default and yarn"
        yield Limit("rope_scaling", rope, fault)
    elif kind == "yarn" and (rope.get("truncate") is False or rope.get("attention_factor") is not None):
        yield Limit("rope_scaling", rope, f"of type yarn with truncate=false or attention_factor {NOT_SUPPORTED}")
    elif kind == "yarn" and scale_all and not rope.get("mscale"):
        yield Limit("rope_scaling", rope, f"of type yarn with mscale_all_dim={scale_all} and no mscale {NOT_SUPPORTED}")


def expert_groups(hf: "Fields") -> tuple[int, int] | None:
    """Return the number of expert groups and how many of them a token chooses; None if it may choose all."""
    groups = getattr(hf, "n_group", None) or 1
    chosen = getattr(hf, "topk_group", groups) or 1
    return (groups, chosen) if groups > 1 and chosen < groups else None


def router_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of the router."""
    groups = expert_groups(hf)
    each = getattr(hf, "num_experts_per_tok", None)
    if groups and each is not None and each // groups[1] != 2:
        fault = (
            f"with topk_group={groups[1]} {NOT_SUPPORTED}: Megatron-Core ranks a group by its two best experts, so a "
            "token must choose two experts per group"
        )
        yield Limit("num_experts_per_tok", each, fault)
    if getattr(hf, "norm_topk_prob", True):
        yield from _lone_expert_limits(hf)
    elif (each or 1) > 1:
        yield Limit("norm_topk_prob", hf.norm_topk_prob, f"{NOT_SUPPORTED} for this model")
    if getattr(hf, "routed_scaling_factor", None) == 0:
        yield Limit("routed_scaling_factor", hf.routed_scaling_factor, f"{NOT_SUPPORTED}, for which 0 means 1")
    if getattr(hf, "n_shared_experts", None) == 0:
        yield Limit("n_shared_experts", 0, NOT_SUPPORTED)


def stack_limits(hf: "Fields") -> Iterator[Limit]:
    """Yield the limits of stacked experts: sizes whose two layouts in checkpoints have the same shape, and a router
    that does not normalise, which transformers ignores and vLLM does not.
    """
    yield from _lone_expert_limits(hf)
    if getattr(hf, "norm_topk_prob", True) is False:
        yield Limit("norm_topk_prob", False, f"{NOT_SUPPORTED} for this model")
    hidden = getattr(hf, "hidden_size", None)
    width = getattr(hf, "moe_intermediate_size", None)
    if width is not None and hidden in (width, 2 * width):
        fault = f"with hidden_size={hidden} {NOT_SUPPORTED}: stacked experts may be stored transposed, and their shape "
        yield Limit("moe_intermediate_size", width, f"{fault}must show it")


_DENSE: tuple[Rule, ...] = (dense_limits, rope_limits)
_EXPERTS: tuple[Rule, ...] = (expert_limits, dense_limits, rope_limits)
VISION_LIMITS: dict[str, tuple[Rule, ...]] = {
    "Qwen2VLForConditionalGeneration": (dense_limits, vision_rope_limits),
    "Qwen2_5_VLForConditionalGeneration": (dense_limits, vision_rope_limits),
    "Qwen3VLForConditionalGeneration": (dense_limits, vision_rope_limits),
    "Qwen3VLMoeForConditionalGeneration": (stack_limits, dense_limits, vision_rope_limits),
}
"""The rules for the language model of each vision-language architecture, in order."""
LIMITS: dict[str, tuple[Rule, ...]] = {
    "LlamaForCausalLM": (bias_limits, dense_limits, rope_limits),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), _DENSE),
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"), _EXPERTS),
    "MixtralForCausalLM": (mixtral_limits, dense_limits, rope_limits),
    "DeepseekV3ForCausalLM": (dense_limits, router_limits, latent_limits),
    "Glm4MoeForCausalLM": (dense_limits, router_limits, scaling_limits),
    **VISION_LIMITS,
}
"""The rules of each architecture, in order."""

_CLASSIFIERS = re.compile("For(Token|Sequence)Classification$")


def causal_name(architecture: str) -> str:
    """Return the causal architecture of a classifier's architecture; other names are returned unchanged."""
    seeing = _CLASSIFIERS.sub("ForConditionalGeneration", architecture)
    return seeing if seeing in LIMITS else _CLASSIFIERS.sub("ForCausalLM", architecture)


def model_limits(architecture: str, hf: "Fields") -> Iterator[Limit]:
    """Yield the violated limits of a model; unknown architectures have none.

    Args: ``hf`` has the fields of the language model.
    """
    for rule in LIMITS.get(causal_name(architecture), ()):
        yield from rule(hf)
