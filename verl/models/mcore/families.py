"""The model families that Megatron-Core can hold: their configuration and where each of their weights goes.

To add a family, describe it by a ``Family`` and enter it with ``register_family`` under the architecture that its
``config.json`` names. Nothing here imports Megatron-Core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.models.mcore.weights import Columns, QueryKeyValue, Rows, Rule, Stacked, Vocabulary, Whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "decoder.layers.{layer}."
EXPERT = "mlp.experts.local_experts.{expert}."
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that Transformer Engine joins with the projection behind them; checkpoints have them under these names."""
HEAD_NAMES = ("score.weight", "score.bias")
"""What a value head is called in a checkpoint."""


class UnsupportedModelError(ValueError, NotImplementedError):
    """Megatron-Core, or this code around it, cannot hold the model."""


@dataclass(frozen=True)
class Family:
    """How one kind of Hugging Face model becomes a ``GPTModel``.

    ``config`` gives arguments of ``TransformerConfig``, ``layer`` the rules for the parameters of one layer by their
    names behind ``decoder.layers.<n>.``.
    """

    config: Callable[["PretrainedConfig"], dict[str, Any]]
    layer: Callable[["PretrainedConfig"], dict[str, Rule]]


_FAMILIES: dict[str, Family] = {}


def register_family(architecture: str, family: Family) -> None:
    """Enter a family under the name of an architecture."""
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    """Return the names that ``find_family`` knows."""
    return sorted(_FAMILIES)


def architecture_of(hf_config: "PretrainedConfig") -> str:
    """Return the architecture of a configuration; a token classifier counts as its causal model.

    Raises: UnsupportedModelError when it does not name exactly one that is known.
    """
    named = list(hf_config.architectures or [])
    if len(named) != 1:
        raise UnsupportedModelError(f"config.json must name one architecture, it names {named}")
    name: str = named[0].replace("ForTokenClassification", "ForCausalLM")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"architecture {named[0]} is not supported with strategy=megatron: it knows "
            f"{', '.join(supported_architectures())}; write strategy=fsdp"
        )
    return name


def find_family(hf_config: "PretrainedConfig") -> Family:
    """Return the family of a model.

    Raises: UnsupportedModelError when there is none.
    """
    return _FAMILIES[architecture_of(hf_config)]


# What dense decoders share


def head_dim(hf: "PretrainedConfig") -> int:
    """Return the width of one attention head."""
    own: int | None = getattr(hf, "head_dim", None)
    return own or hf.hidden_size // hf.num_attention_heads


def num_experts(hf: "PretrainedConfig") -> int | None:
    """Return how many experts a layer has; None for a dense model."""
    count: int | None = getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", None)
    return count


def rope_arguments(hf: "PretrainedConfig") -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` for rotary positions.

    Raises: UnsupportedModelError for a scaling that Megatron-Core computes differently.
    """
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", 10000.0),
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        other = {name: rope.get(name) for name, value in fixed.items() if rope.get(name) != value}
        if other:
            raise UnsupportedModelError(
                f"rope_scaling of type llama3 with {other} is not supported with strategy=megatron, which has {fixed}"
            )
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind != "default":
        raise UnsupportedModelError(
            f"rope_scaling of type {kind} is not supported with strategy=megatron: it knows default, linear and llama3"
        )
    return arguments


def dense_config(hf: "PretrainedConfig", **changes: Any) -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig`` that Llama and its relatives share.

    Raises: UnsupportedModelError for what such a model may have and Megatron-Core has not.
    """
    for name, wanted in (("mlp_bias", False), ("use_sliding_window", False)):
        if getattr(hf, name, wanted) != wanted:
            raise UnsupportedModelError(f"{name}={getattr(hf, name)} is not supported with strategy=megatron")
    if hf.hidden_act != "silu":
        raise UnsupportedModelError(
            f"hidden_act={hf.hidden_act} is not supported with strategy=megatron: it knows silu"
        )
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


def attention_rules(hf: "PretrainedConfig", bias: bool, qk_norm: bool) -> dict[str, Rule]:
    """Return the rules of self-attention and the norm before it."""
    at, heads, groups, dim = "model.layers.{layer}.", hf.num_attention_heads, hf.num_key_value_heads, head_dim(hf)
    rules: dict[str, Rule] = {"input_layernorm.weight": Whole(f"{at}input_layernorm.weight")}
    for kind in ("weight", "bias") if bias else ("weight",):
        names = [f"{at}self_attn.{part}_proj.{kind}" for part in "qkv"]
        rules[f"self_attention.linear_qkv.{kind}"] = QueryKeyValue(*names, heads, groups, dim)
    if qk_norm:
        rules["self_attention.q_layernorm.weight"] = Whole(f"{at}self_attn.q_norm.weight")
        rules["self_attention.k_layernorm.weight"] = Whole(f"{at}self_attn.k_norm.weight")
    rules["self_attention.linear_proj.weight"] = Rows(f"{at}self_attn.o_proj.weight", heads * dim)
    rules["pre_mlp_layernorm.weight"] = Whole(f"{at}post_attention_layernorm.weight")
    return rules


def dense_mlp_rules(hf: "PretrainedConfig", at: str = "model.layers.{layer}.mlp.") -> dict[str, Rule]:
    """Return the rules of a gated MLP."""
    return {
        "mlp.linear_fc1.weight": Stacked((f"{at}gate_proj.weight", f"{at}up_proj.weight"), hf.intermediate_size),
        "mlp.linear_fc2.weight": Rows(f"{at}down_proj.weight", hf.intermediate_size),
    }


def outer_rules(hf: "PretrainedConfig", is_value_model: bool, tied: bool) -> dict[str, Rule]:
    """Return the rules of everything that is not in a layer."""
    rules: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight", hf.vocab_size),
        "decoder.final_layernorm.weight": Whole("model.norm.weight"),
    }
    if is_value_model:
        return rules | {"output_layer.weight": Whole(HEAD_NAMES[0]), "output_layer.bias": Whole(HEAD_NAMES[1])}
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return rules | {"output_layer.weight": Vocabulary(head, hf.vocab_size)}


# Families


@dataclass(frozen=True)
class _Dense:
    """A dense decoder with or without biases of query, key and value, and norms of query and key."""

    qkv_bias: Callable[["PretrainedConfig"], bool]
    qk_norm: bool = False
    refuses: dict[str, Any] = field(default_factory=dict)

    def config(self, hf: "PretrainedConfig") -> dict[str, Any]:
        for name, wrong in self.refuses.items():
            if getattr(hf, name, None) == wrong:
                raise UnsupportedModelError(f"{name}={wrong} is not supported with strategy=megatron")
        return dense_config(hf, add_qkv_bias=self.qkv_bias(hf), qk_layernorm=self.qk_norm)

    def layer(self, hf: "PretrainedConfig") -> dict[str, Rule]:
        return attention_rules(hf, self.qkv_bias(hf), self.qk_norm) | dense_mlp_rules(hf)

    def family(self) -> Family:
        return Family(self.config, self.layer)


def _no_bias(hf: "PretrainedConfig") -> bool:
    return False


def _always_bias(hf: "PretrainedConfig") -> bool:
    return True


# attention_bias of Llama and Qwen3 also puts a bias on the output projection, which Megatron-Core ties to the MLP's.
register_family("LlamaForCausalLM", _Dense(_no_bias, refuses={"attention_bias": True}).family())
register_family("Qwen2ForCausalLM", _Dense(_always_bias).family())
register_family("Qwen3ForCausalLM", _Dense(_no_bias, qk_norm=True, refuses={"attention_bias": True}).family())


@dataclass(frozen=True)
class _Experts:
    """A decoder with experts in every layer. ``at`` and ``parts`` (gate, up, down) name them in a checkpoint."""

    width: str
    qkv_bias: bool = False
    qk_norm: bool = False
    shared: bool = False
    at: str = "model.layers.{layer}.mlp."
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def config(self, hf: "PretrainedConfig") -> dict[str, Any]:
        for name, wanted in (("decoder_sparse_step", 1), ("attention_bias", False), ("sliding_window", 0)):
            if (getattr(hf, name, None) or wanted) != wanted:
                raise UnsupportedModelError(f"{name}={getattr(hf, name)} is not supported with strategy=megatron")
        if getattr(hf, "mlp_only_layers", None):
            raise UnsupportedModelError(f"mlp_only_layers={hf.mlp_only_layers} is not supported with strategy=megatron")
        experts: dict[str, Any] = {
            "num_moe_experts": num_experts(hf),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, self.width),
            "moe_router_pre_softmax": getattr(hf, "norm_topk_prob", None) is False,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
        }
        if self.shared:
            experts["moe_shared_expert_intermediate_size"] = hf.shared_expert_intermediate_size
            experts["moe_shared_expert_gate"] = True
        return dense_config(hf, add_qkv_bias=self.qkv_bias, qk_layernorm=self.qk_norm, **experts)

    def layer(self, hf: "PretrainedConfig") -> dict[str, Rule]:
        width, at = getattr(hf, self.width), f"{self.at}experts.{{expert}}."
        gate, up, down = (f"{at}{part}.weight" for part in self.parts)
        rules = attention_rules(hf, self.qkv_bias, self.qk_norm) | {
            "mlp.router.weight": Whole(f"{self.at}gate.weight"),
            f"{EXPERT}linear_fc1.weight": Stacked((gate, up), width),
            f"{EXPERT}linear_fc2.weight": Rows(down, width),
        }
        if self.shared:
            shared, width = f"{self.at}shared_expert.", hf.shared_expert_intermediate_size
            rules |= {
                "mlp.shared_experts.gate_weight": Whole(f"{self.at}shared_expert_gate.weight"),
                "mlp.shared_experts.linear_fc1.weight": Stacked(
                    (f"{shared}gate_proj.weight", f"{shared}up_proj.weight"), width
                ),
                "mlp.shared_experts.linear_fc2.weight": Rows(f"{shared}down_proj.weight", width),
            }
        return rules

    def family(self) -> Family:
        return Family(self.config, self.layer)


register_family("Qwen2MoeForCausalLM", _Experts("moe_intermediate_size", qkv_bias=True, shared=True).family())
register_family("Qwen3MoeForCausalLM", _Experts("moe_intermediate_size", qk_norm=True).family())
register_family(
    "MixtralForCausalLM",
    _Experts("intermediate_size", at="model.layers.{layer}.block_sparse_moe.", parts=("w1", "w3", "w2")).family(),
)

__all__ = [
    "Columns",
    "EXPERT",
    "FUSED_NORMS",
    "Family",
    "HEAD_NAMES",
    "LAYER",
    "UnsupportedModelError",
    "architecture_of",
    "attention_rules",
    "dense_config",
    "dense_mlp_rules",
    "find_family",
    "head_dim",
    "num_experts",
    "outer_rules",
    "register_family",
    "rope_arguments",
    "supported_architectures",
]
