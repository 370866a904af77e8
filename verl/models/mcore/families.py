"""Describe the model families on Megatron-Core: their configuration and the mapping of their weights.

To add a family, describe it by a ``Family`` and register it with ``register_family`` under the architecture name of its
``config.json``. This module does not import Megatron-Core.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import UnsupportedInput
from verl.models import mcore_limits
from verl.models.mcore.weights import (
    Columns,
    QueryKeyValue,
    Rows,
    Rule,
    Stacked,
    TransposedRows,
    TransposedStacked,
    Vocabulary,
    Whole,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "decoder.layers.{layer}."
EXPERT = "mlp.experts.local_experts.{expert}."
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norm -> its name in Transformer Engine, which fuses it with the projection that follows it."""
HEAD_NAMES = ("score.weight", "score.bias")
"""Checkpoint names of a value head."""
LANGUAGE = "model."
"""Prefix of a text model's names in a checkpoint, with which all rules are written."""
TOWER = "visual."
"""Prefix of the vision tower's parameters in a ``GPTModel``."""


def refuse(limits: Iterable[mcore_limits.Limit]) -> None:
    """Raise UnsupportedInput for the first limit, if there is any."""
    for limit in limits:
        raise UnsupportedInput(str(limit))


Arguments = dict[str, Any]
"""Arguments of ``TransformerConfig`` or ``GPTModel``: numbers, names, functions and types of torch."""


@dataclass(frozen=True)
class VisionParts:
    """The parts of a vision-language family besides its language model.

    Args:
        sections: frequencies of frame, row and column in a head, if ``config.json`` does not say them.
        interleaved: whether the axes take turns over the frequencies, instead of one section after the other.
        language: prefix of the language model in a checkpoint.
        tower: prefix of the vision tower in a checkpoint.
    """

    sections: tuple[int, int, int]
    interleaved: bool = False
    language: str = LANGUAGE
    tower: str = TOWER


@dataclass(frozen=True)
class Family:
    """The conversion of one family of Hugging Face models to a ``GPTModel``.

    ``config`` returns arguments of ``TransformerConfig``. ``layer`` returns the rules for the parameters of all kinds
    of layers, by their names after ``decoder.layers.<n>.``. ``rope`` returns arguments of ``GPTModel`` for rotary
    positions.

    The functions of a family with ``vision`` take the configuration of the whole model.
    """

    config: Callable[["PretrainedConfig"], Arguments]
    layer: Callable[["PretrainedConfig"], dict[str, Rule]]
    rope: Callable[["PretrainedConfig"], Arguments] = field(default_factory=lambda: rope_arguments)
    vision: VisionParts | None = None

    def rules_of(self, hf: "PretrainedConfig", layer: int) -> dict[str, Rule]:
        """Return the rules for one layer, which has either experts or an MLP."""
        rules = self.layer(hf)
        if num_experts(hf) is None:
            return rules
        with_experts = layer_has_experts(text_of(hf), layer)
        return {name: rule for name, rule in rules.items() if _is_of(name, with_experts)}


_FAMILIES: dict[str, Family] = {}


def register_family(architecture: str, family: Family) -> None:
    """Register a family under the name of an architecture."""
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    """Return the names of all registered architectures."""
    return sorted(_FAMILIES)


def find_family(hf_config: "PretrainedConfig") -> Family:
    """Return the family of a model; a classifier belongs to the family of its causal model.

    Raises: UnsupportedInput unless it names exactly one registered architecture.
    """
    named = list(hf_config.architectures or [])
    if len(named) != 1:
        raise UnsupportedInput(f"config.json must name one architecture, it names {named}")
    name = mcore_limits.causal_name(named[0])
    if name not in _FAMILIES:
        raise UnsupportedInput(
            f"architecture {named[0]} is not supported with strategy=megatron, which supports "
            f"{', '.join(supported_architectures())}; set strategy=fsdp"
        )
    return _FAMILIES[name]


def text_of(hf: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the language model, which is that of the model itself unless it has a tower."""
    return hf.get_text_config()


# Shared by dense decoders


def head_dim(hf: "PretrainedConfig") -> int:
    """Return the width of one attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def num_experts(hf: "PretrainedConfig") -> int | None:
    """Return the number of experts of a layer; None for a dense model."""
    text = text_of(hf)
    return getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)


def layer_has_experts(hf: "PretrainedConfig", layer: int) -> bool:
    """Return whether layer number ``layer``, counted from 0, of a mixture-of-experts model has experts."""
    if layer < (getattr(hf, "first_k_dense_replace", None) or 0):
        return False
    if layer in (getattr(hf, "mlp_only_layers", None) or ()):
        return False
    return bool((layer + 1) % (getattr(hf, "decoder_sparse_step", None) or 1) == 0)


def _is_of(name: str, with_experts: bool) -> bool:
    """Return whether a parameter belongs to the given kind of layer, with or without experts."""
    return not name.startswith("mlp.") or name.startswith("mlp.linear_fc") != with_experts


def rope_arguments(hf: "PretrainedConfig") -> Arguments:
    """Return the arguments of ``GPTModel`` for rotary positions.

    Raises: UnsupportedInput if Megatron-Core computes this scaling differently.
    """
    refuse(mcore_limits.rope_limits(hf))
    return _scaled_rope(mcore_limits.rope_of(hf))


def partial_rope_arguments(hf: "PretrainedConfig") -> Arguments:
    """Return the arguments for RoPE that rotates only the first ``partial_rotary_factor`` of each head.

    Raises: as ``rope_arguments``.
    """
    refuse(mcore_limits.scaling_limits(hf))
    rope = mcore_limits.rope_of(hf)
    return _scaled_rope(rope) | {"rotary_percent": rope.get("partial_rotary_factor", 1.0)}


def _scaled_rope(rope: Arguments) -> Arguments:
    arguments: Arguments = {"position_embedding_type": "rope", "rotary_base": rope.get("rope_theta", 10000.0)}
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return arguments


def dense_config(hf: "PretrainedConfig", **changes: Any) -> Arguments:
    """Return the arguments of ``TransformerConfig`` that Llama-like models share.

    Raises: UnsupportedInput for options that Megatron-Core does not support.
    """
    refuse(mcore_limits.dense_limits(hf))
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf.rms_norm_eps,
        "attention_dropout": getattr(hf, "attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
    } | changes


def attention_rules(hf: "PretrainedConfig", bias: bool, qk_norm: bool, output_bias: bool = False) -> dict[str, Rule]:
    """Return the rules of self-attention and its norms."""
    at = "model.layers.{layer}."
    heads = hf.num_attention_heads
    groups = hf.num_key_value_heads
    dim = head_dim(hf)
    rules: dict[str, Rule] = {"input_layernorm.weight": Whole(f"{at}input_layernorm.weight")}
    for kind in ("weight", "bias") if bias else ("weight",):
        names = tuple(f"{at}self_attn.{part}_proj.{kind}" for part in "qkv")
        rules[f"self_attention.linear_qkv.{kind}"] = QueryKeyValue(names, heads, groups, dim)
    if qk_norm:
        rules["self_attention.q_layernorm.weight"] = Whole(f"{at}self_attn.q_norm.weight")
        rules["self_attention.k_layernorm.weight"] = Whole(f"{at}self_attn.k_norm.weight")
    rules["self_attention.linear_proj.weight"] = Rows(f"{at}self_attn.o_proj.weight", heads * dim)
    if output_bias:
        rules["self_attention.linear_proj.bias"] = Whole(f"{at}self_attn.o_proj.bias")
    rules["pre_mlp_layernorm.weight"] = Whole(f"{at}post_attention_layernorm.weight")
    return rules


def dense_mlp_rules(hf: "PretrainedConfig", bias: bool = False) -> dict[str, Rule]:
    """Return the rules of a gated MLP."""
    at = "model.layers.{layer}.mlp."
    biases: dict[str, Rule] = {
        "mlp.linear_fc1.bias": Stacked((f"{at}gate_proj.bias", f"{at}up_proj.bias"), hf.intermediate_size),
        "mlp.linear_fc2.bias": Whole(f"{at}down_proj.bias"),
    }
    return (biases if bias else {}) | {
        "mlp.linear_fc1.weight": Stacked((f"{at}gate_proj.weight", f"{at}up_proj.weight"), hf.intermediate_size),
        "mlp.linear_fc2.weight": Rows(f"{at}down_proj.weight", hf.intermediate_size),
    }


def outer_rules(hf: "PretrainedConfig", is_value_model: bool, tied: bool) -> dict[str, Rule]:
    """Return the rules of all parameters outside the layers."""
    at = language_prefix(hf)
    vocab_size = text_of(hf).vocab_size
    rules: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Vocabulary(f"{at}embed_tokens.weight", vocab_size),
        "decoder.final_layernorm.weight": Whole(f"{at}norm.weight"),
    }
    if is_value_model:
        return rules | {"output_layer.weight": Whole(HEAD_NAMES[0]), "output_layer.bias": Whole(HEAD_NAMES[1])}
    head = f"{at}embed_tokens.weight" if tied else "lm_head.weight"
    return rules | {"output_layer.weight": Vocabulary(head, vocab_size)}


def language_prefix(hf: "PretrainedConfig") -> str:
    """Return the prefix of the language model's names in a checkpoint."""
    vision = find_family(hf).vision
    return LANGUAGE if vision is None else vision.language


def tower_rule(hf: "PretrainedConfig", name: str) -> Rule | None:
    """Return the rule of a parameter of the vision tower; None for other parameters."""
    vision = find_family(hf).vision
    if vision is None or not name.startswith(TOWER):
        return None
    return Whole(f"{vision.tower}{name.removeprefix(TOWER)}")


# Families


def _attention_bias(hf: "PretrainedConfig") -> bool:
    return bool(getattr(hf, "attention_bias", False))


@dataclass(frozen=True)
class _Dense:
    """A dense decoder.

    ``qkv_bias`` gives query, key and value biases whatever the configuration says. ``takes_biases`` are the fields that
    the family has: ``attention_bias`` covers the output projection, too, and others are ignored as in transformers.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    takes_biases: tuple[str, ...] = ()

    def config(self, hf: "PretrainedConfig") -> Arguments:
        bias = self._has("attention_bias", hf)
        mlp_bias = self._has("mlp_bias", hf)
        if mlp_bias:
            refuse(mcore_limits.bias_limits(hf))
        return dense_config(
            hf,
            add_qkv_bias=self.qkv_bias or bias,
            add_bias_linear=mlp_bias,
            attention_output_bias=bias and not mlp_bias,
            qk_layernorm=self.qk_norm,
        )

    def layer(self, hf: "PretrainedConfig") -> dict[str, Rule]:
        bias = self._has("attention_bias", hf)
        attention = attention_rules(hf, self.qkv_bias or bias, self.qk_norm, bias)
        return attention | dense_mlp_rules(hf, bias=self._has("mlp_bias", hf))

    def _has(self, bias: str, hf: "PretrainedConfig") -> bool:
        return bias in self.takes_biases and bool(getattr(hf, bias, False))

    def family(self) -> Family:
        return Family(self.config, self.layer)


_QWEN2 = _Dense(qkv_bias=True).family()
_QWEN3 = _Dense(qk_norm=True, takes_biases=("attention_bias",)).family()
register_family("LlamaForCausalLM", _Dense(takes_biases=("attention_bias", "mlp_bias")).family())
register_family("Qwen2ForCausalLM", _QWEN2)
register_family("Qwen3ForCausalLM", _QWEN3)


def expert_config(hf: "PretrainedConfig", width: int) -> Arguments:
    """Return the arguments of ``TransformerConfig`` that models with experts share.

    Raises: UnsupportedInput for a model of such a family that has no experts.
    """
    if not num_experts(hf):
        raise UnsupportedInput(f"num_experts=0 {mcore_limits.NOT_SUPPORTED}: name the family's dense architecture")
    pattern = [int(layer_has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)]
    return {
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def expert_rules(at: str, parts: tuple[str, str, str], width: int) -> dict[str, Rule]:
    """Return the rules of the router and the experts; ``parts`` names their gate, up and down projections."""
    gate, up, down = (f"{at}experts.{{expert}}.{part}.weight" for part in parts)
    return {
        "mlp.router.weight": Whole(f"{at}gate.weight"),
        f"{EXPERT}linear_fc1.weight": Stacked((gate, up), width),
        f"{EXPERT}linear_fc2.weight": Rows(down, width),
    }


def stacked_expert_rules(at: str, width: int) -> dict[str, Rule]:
    """Return the rules of the router and of experts that a checkpoint holds stacked and transposed."""
    return {
        "mlp.router.weight": Whole(f"{at}gate.weight"),
        f"{EXPERT}linear_fc1.weight": TransposedStacked(f"{at}experts.{{expert}}.gate_up_proj", 2, width),
        f"{EXPERT}linear_fc2.weight": TransposedRows(f"{at}experts.{{expert}}.down_proj", width),
    }


def shared_expert_rules(at: str, width: int) -> dict[str, Rule]:
    """Return the rules of the shared expert, which processes every token."""
    return {
        "mlp.shared_experts.linear_fc1.weight": Stacked((f"{at}gate_proj.weight", f"{at}up_proj.weight"), width),
        "mlp.shared_experts.linear_fc2.weight": Rows(f"{at}down_proj.weight", width),
    }


@dataclass(frozen=True)
class _Experts:
    """A mixture-of-experts decoder.

    ``at`` and ``parts`` (gate, up, down) name the experts in a checkpoint; without ``parts`` it holds them stacked.
    With ``qkv_bias`` query, key and value have biases unless the model's ``qkv_bias`` is False; ``takes_bias`` lets its
    ``attention_bias`` give them, and the output projection, biases. With ``normalises`` the weights of a token's
    experts always add up to 1, otherwise if ``norm_topk_prob`` says so.
    """

    width: str
    limits: mcore_limits.Rule
    qkv_bias: bool = False
    takes_bias: bool = False
    qk_norm: bool = False
    shared: bool = False
    normalises: bool = False
    at: str = "model.layers.{layer}.mlp."
    parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")

    def config(self, hf: "PretrainedConfig") -> Arguments:
        refuse(self.limits(hf))
        experts = expert_config(hf, getattr(hf, self.width)) | {
            "moe_router_pre_softmax": not (self.normalises or hf.norm_topk_prob)
        }
        if self.shared:
            experts["moe_shared_expert_intermediate_size"] = hf.shared_expert_intermediate_size
            experts["moe_shared_expert_gate"] = True
        return dense_config(
            hf,
            add_qkv_bias=self._qkv_bias(hf),
            attention_output_bias=self._bias(hf),
            qk_layernorm=self.qk_norm,
            **experts,
        )

    def _bias(self, hf: "PretrainedConfig") -> bool:
        return self.takes_bias and _attention_bias(hf)

    def _qkv_bias(self, hf: "PretrainedConfig") -> bool:
        return self._bias(hf) or (self.qkv_bias and bool(hf.qkv_bias))

    def layer(self, hf: "PretrainedConfig") -> dict[str, Rule]:
        rules = attention_rules(hf, self._qkv_bias(hf), self.qk_norm, self._bias(hf))
        width = getattr(hf, self.width)
        if self.parts is None:
            rules |= stacked_expert_rules(self.at, width)
        else:
            rules |= expert_rules(self.at, self.parts, width)
        if self.shared:
            rules["mlp.shared_experts.gate_weight"] = Whole(f"{self.at}shared_expert_gate.weight")
            rules |= shared_expert_rules(f"{self.at}shared_expert.", hf.shared_expert_intermediate_size)
        if not all(layer_has_experts(hf, layer) for layer in range(hf.num_hidden_layers)):
            rules |= dense_mlp_rules(hf)
        return rules

    def family(self) -> Family:
        return Family(self.config, self.layer)


register_family(
    "Qwen2MoeForCausalLM",
    _Experts("moe_intermediate_size", mcore_limits.expert_limits, qkv_bias=True, shared=True).family(),
)
register_family(
    "Qwen3MoeForCausalLM",
    _Experts("moe_intermediate_size", mcore_limits.expert_limits, takes_bias=True, qk_norm=True).family(),
)
register_family(
    "MixtralForCausalLM",
    _Experts(
        "intermediate_size",
        mcore_limits.mixtral_limits,
        normalises=True,
        at="model.layers.{layer}.block_sparse_moe.",
        parts=("w1", "w3", "w2"),
    ).family(),
)


# DeepSeek-V3, Moonlight and GLM-4-MoE: a sigmoid router with a bias and groups, shared experts, dense first layers


def _sigmoid_router_config(hf: "PretrainedConfig") -> Arguments:
    """Return the arguments of ``TransformerConfig`` for the experts.

    Raises: UnsupportedInput if Megatron-Core's router would choose or weight experts differently.
    """
    refuse(mcore_limits.router_limits(hf))
    groups, chosen = mcore_limits.expert_groups(hf) or (None, None)
    return expert_config(hf, hf.moe_intermediate_size) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # only pretraining updates the bias
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
    }


def _sigmoid_router_rules(hf: "PretrainedConfig") -> dict[str, Rule]:
    """Return the rules of router and experts, and of the MLP if there are dense layers."""
    at = "model.layers.{layer}.mlp."
    width = hf.moe_intermediate_size
    rules = expert_rules(at, ("gate_proj", "up_proj", "down_proj"), width)
    rules["mlp.router.expert_bias"] = Whole(f"{at}gate.e_score_correction_bias")
    rules |= shared_expert_rules(f"{at}shared_experts.", hf.n_shared_experts * width)
    return rules | (dense_mlp_rules(hf) if hf.first_k_dense_replace else {})


def _latent_attention_config(hf: "PretrainedConfig") -> Arguments:
    """Return the arguments of ``MLATransformerConfig``.

    Raises: UnsupportedInput if Megatron-Core computes this attention differently.
    """
    refuse(mcore_limits.latent_limits(hf))
    rope = mcore_limits.rope_of(hf)
    values: Arguments = {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": rope.get("rope_theta", 10000.0),
        "rotary_scaling_factor": 1.0,
    }
    if rope.get("rope_type") == "yarn":
        scale = rope.get("mscale")
        scale_all = rope.get("mscale_all_dim")
        values |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope.get("original_max_position_embeddings")
            or hf.max_position_embeddings,
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": scale if scale_all else 1.0,  # transformers uses them only together
            "mscale_all_dim": scale_all or 0.0,
        }
    return values


def _deepseek_config(hf: "PretrainedConfig") -> Arguments:
    return dense_config(hf) | _sigmoid_router_config(hf) | _latent_attention_config(hf)


def _deepseek_layer(hf: "PretrainedConfig") -> dict[str, Rule]:
    at = "model.layers.{layer}."
    heads = hf.num_attention_heads
    query = hf.qk_nope_head_dim + hf.qk_rope_head_dim
    key_value = hf.qk_nope_head_dim + hf.v_head_dim
    rules: dict[str, Rule] = {
        "input_layernorm.weight": Whole(f"{at}input_layernorm.weight"),
        "self_attention.linear_kv_down_proj.weight": Whole(f"{at}self_attn.kv_a_proj_with_mqa.weight"),
        "self_attention.kv_layernorm.weight": Whole(f"{at}self_attn.kv_a_layernorm.weight"),
        "self_attention.linear_kv_up_proj.weight": Columns(f"{at}self_attn.kv_b_proj.weight", heads * key_value),
        "self_attention.linear_proj.weight": Rows(f"{at}self_attn.o_proj.weight", heads * hf.v_head_dim),
        "pre_mlp_layernorm.weight": Whole(f"{at}post_attention_layernorm.weight"),
    }
    if hf.q_lora_rank is None:
        rules["self_attention.linear_q_proj.weight"] = Columns(f"{at}self_attn.q_proj.weight", heads * query)
    else:
        rules |= {
            "self_attention.linear_q_down_proj.weight": Whole(f"{at}self_attn.q_a_proj.weight"),
            "self_attention.q_layernorm.weight": Whole(f"{at}self_attn.q_a_layernorm.weight"),
            "self_attention.linear_q_up_proj.weight": Columns(f"{at}self_attn.q_b_proj.weight", heads * query),
        }
    return rules | _sigmoid_router_rules(hf)


def _deepseek_rope(hf: "PretrainedConfig") -> Arguments:
    return {"position_embedding_type": "rope"}  # latent attention computes its own positions


def _glm4_moe_config(hf: "PretrainedConfig") -> Arguments:
    attention = {"add_qkv_bias": _attention_bias(hf), "qk_layernorm": hf.use_qk_norm}
    return dense_config(hf, **attention) | _sigmoid_router_config(hf)


def _glm4_moe_layer(hf: "PretrainedConfig") -> dict[str, Rule]:
    return attention_rules(hf, bias=_attention_bias(hf), qk_norm=hf.use_qk_norm) | _sigmoid_router_rules(hf)


register_family("DeepseekV3ForCausalLM", Family(_deepseek_config, _deepseek_layer, _deepseek_rope))
register_family("Glm4MoeForCausalLM", Family(_glm4_moe_config, _glm4_moe_layer, partial_rope_arguments))


# Vision-language models: the language model of a text family, with three axes of positions, and a vision tower


def _vision_rope(hf: "PretrainedConfig") -> Arguments:
    """Return the arguments of ``GPTModel`` for positions along three axes.

    Raises: UnsupportedInput if Megatron-Core computes this scaling differently.
    """
    text = text_of(hf)
    refuse(mcore_limits.vision_rope_limits(text))
    return {
        "position_embedding_type": "mrope",
        "rotary_base": mcore_limits.rope_of(text).get("rope_theta", 10000.0),
    }


def vision_family(text: Family, vision: VisionParts) -> Family:
    """Return the family of a model whose language model is of the family ``text``."""

    def config(hf: "PretrainedConfig") -> Arguments:
        own = text_of(hf)
        sections = mcore_limits.rope_of(own).get("mrope_section", list(vision.sections))
        return text.config(own) | {"mrope_section": sections}

    def rename(name: str) -> str:
        return f"{vision.language}{name.removeprefix(LANGUAGE)}"

    def layer(hf: "PretrainedConfig") -> dict[str, Rule]:
        return {name: rule.renamed(rename) for name, rule in text.layer(text_of(hf)).items()}

    return Family(config, layer, _vision_rope, vision)


_QWEN2_VL = vision_family(_QWEN2, VisionParts((16, 24, 24)))
_OF_QWEN3_VL = VisionParts((24, 20, 20), interleaved=True, language="model.language_model.", tower="model.visual.")
_QWEN3_VL_EXPERTS = _Experts(
    "moe_intermediate_size", mcore_limits.stack_limits, takes_bias=True, qk_norm=True, normalises=True, parts=None
)
register_family("Qwen2VLForConditionalGeneration", _QWEN2_VL)
register_family("Qwen2_5_VLForConditionalGeneration", _QWEN2_VL)
register_family("Qwen3VLForConditionalGeneration", vision_family(_QWEN3, _OF_QWEN3_VL))
register_family("Qwen3VLMoeForConditionalGeneration", vision_family(_QWEN3_VL_EXPERTS.family(), _OF_QWEN3_VL))


# Single tensors, for callers that gather the parts themselves


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(re.escape(EXPERT).replace(r"\{expert\}", r"(\d+)") + "(.+)")
_PLAIN_NORMS = {fused: plain for plain, fused in FUSED_NORMS.items()}


class WeightConverter:
    """Converts one model's weights from Megatron-Core to checkpoint names; with ``dtype`` None it keeps their dtype."""

    def __init__(self, hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        of_value_model = outer_rules(hf_config, True, tied)
        self._value_head = of_value_model["output_layer.weight"]
        self._outer = of_value_model | outer_rules(hf_config, False, tied)  # and a value head's bias
        self._layer = find_family(hf_config).layer(hf_config)
        self._hf_config = hf_config

    def convert_param(self, name: str, params_one_group: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
        """Return checkpoint names and tensors of one parameter from its parts on all tensor-parallel ranks, in order.

        ``name`` holds the global layer and expert numbers. Raises: ValueError for a name without a rule.
        """
        name = name.removeprefix("module.")
        parts = list(params_one_group)
        layer = expert = None
        rule = self._outer.get(name) or tower_rule(self._hf_config, name)
        if name == "output_layer.weight" and parts and len(parts[0]) == 1:
            rule = self._value_head
        if found := _LAYER.fullmatch(name):
            layer, rest = found.groups()
            if of_expert := _EXPERT.fullmatch(rest):
                expert = of_expert[1]
                rest = f"{EXPERT}{of_expert[2]}"
            rule = self._layer.get(_PLAIN_NORMS.get(rest, rest))
        if rule is None:
            raise ValueError(f"no rule maps Megatron-Core's {name!r} to checkpoint tensors")
        names = [each.format(layer=layer, expert=expert) for each in rule.names]
        return names, [tensor.to(self.dtype or tensor.dtype) for tensor in rule.export(parts)]


def get_mcore_weight_converter(hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> WeightConverter:
    """Return the converter of a model. Raises: UnsupportedInput for an unknown architecture."""
    return WeightConverter(hf_config, dtype)
