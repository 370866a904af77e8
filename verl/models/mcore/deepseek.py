"""DeepSeek-V3 and Moonlight: latent attention, a sigmoid router with a bias and groups, dense first layers."""

from typing import TYPE_CHECKING, Any

from verl.models.mcore import families
from verl.models.mcore.weights import Columns, Rows, Rule, Whole
from verl.models.mcore_limits import expert_groups, latent_limits, rope_of, router_limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def latent_attention_config(hf: "PretrainedConfig") -> dict[str, Any]:
    """Return the arguments of ``MLATransformerConfig``.

    Raises: UnsupportedModelError if Megatron-Core computes this attention differently.
    """
    families.refuse(latent_limits(hf))
    rope = rope_of(hf)
    values: dict[str, Any] = {
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


def router_config(hf: "PretrainedConfig") -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig`` for the router.

    Raises: UnsupportedModelError if Megatron-Core routes differently.
    """
    families.refuse(router_limits(hf))
    groups, chosen = expert_groups(hf) or (None, None)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # only pretraining updates the bias
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
    }


def _config(hf: "PretrainedConfig") -> dict[str, Any]:
    return (
        families.dense_config(hf)
        | families.expert_config(hf, hf.moe_intermediate_size)
        | router_config(hf)
        | latent_attention_config(hf)
    )


def _layer(hf: "PretrainedConfig") -> dict[str, Rule]:
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
    mlp = f"{at}mlp."
    width = hf.moe_intermediate_size
    rules |= families.expert_rules(mlp, ("gate_proj", "up_proj", "down_proj"), width)
    rules["mlp.router.expert_bias"] = Whole(f"{mlp}gate.e_score_correction_bias")
    rules |= families.shared_expert_rules(f"{mlp}shared_experts.", hf.n_shared_experts * width)
    return rules | (families.dense_mlp_rules(hf) if hf.first_k_dense_replace else {})


def _rope(hf: "PretrainedConfig") -> dict[str, Any]:
    return {"position_embedding_type": "rope"}  # latent attention computes its own positions


families.register_family("DeepseekV3ForCausalLM", families.Family(_config, _layer, _rope))
