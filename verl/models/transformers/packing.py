"""Decide which models may read packed rows: several rows in one sequence, with boundaries for the attention.

Layers that carry a state along the sequence do not get the boundaries, and would continue from the state of the
previous row. This imports no torch: the launching process asks too.
"""

from verl.utils.json_types import ConfigJson

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_LAYERS = ("linear", "conv", "mamba", "ssm", "recurrent", "hybrid", "rwkv", "lstm", "delta")
"""Parts of the names of layers that carry a state."""
_FIELDS = ("mamba", "ssm", "state_size", "linear_conv", "linear_attn", "conv_L_cache", "time_mix", "lru_width")
"""Parts of the names of fields that only models with such layers have."""
_FAMILIES = ("rwkv", "xlstm")
"""Values of ``model_type`` of models with such layers whose fields do not show it."""
_IGNORANT = (
    *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "nemotron", "openai-gpt"),
    *("roformer", "stablelm", "xglm"),
)
"""Values of ``model_type`` of models whose attention in transformers asks for no boundaries of rows.

The first pass refuses such models that this list lacks. Written for transformers 5.19.
"""
_CHOOSES_KEYS = ("axk2", "deepseek_v32", "deepseek_v4", "doge", "glm_moe_dsa", "hy_v4", "qwen4_exp_text")
"""Values of ``model_type`` of models that choose what a token sees among all tokens before it."""


def attention_cap(config: ConfigJson) -> str | None:
    """Return the cap of the attention's logits in a config.json, as a field and its value; None without one."""
    text = {**config, **(config.get("text_config") or {})}
    cap = text.get("attn_logit_softcapping")
    return None if cap is None else f"attn_logit_softcapping={cap}"


def state_along_rows(config: ConfigJson) -> str | None:
    """Return the field of a config.json that shows that layers carry a state along the row, else None."""
    text = {**config, **(config.get("text_config") or {})}
    kinds = {str(kind) for name in _LAYER_LISTS for kind in text.get(name) or ()}
    for kind in sorted(kinds):
        if any(part in kind for part in _LAYERS):
            return f"layers of type {kind}"
    for name in sorted(text):
        if any(part in name for part in _FIELDS) and text[name]:
            return f"states of sequences ({name})"
    return f"model_type={text['model_type']}" if text.get("model_type") in _FAMILIES else None


def packing_problem(config: ConfigJson) -> str | None:
    """Return why rows of a model cannot be packed, as the end of a sentence about the key; None if they can."""
    kind = (config.get("text_config") or config).get("model_type")
    if kind in _IGNORANT:
        return ignorant_of_rows(f"model_type={kind!r}")
    if kind in _CHOOSES_KEYS:
        return (
            f"would let rows attend to each other, the attention of model_type={kind!r} chooses among all tokens of a "
            "pass: write false"
        )
    state = state_along_rows(config)
    return state and f"would carry states from one row into the next, the model has {state}: write false"


def ignorant_of_rows(model: str) -> str:
    """Return the end of a sentence about the key: the attention of a model is not told where rows begin."""
    return f"would let rows attend to each other, the attention of {model} is not told where they begin: write false"


def packs_rows(strategy: str, use_remove_padding: bool) -> bool:
    """Whether rows are packed, as they must be to share tokens: Megatron-Core packs them always."""
    return strategy == "megatron" or use_remove_padding
