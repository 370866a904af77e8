"""Decide which models may compute a common prefix of several rows once.

A shared token must not depend on the row: its layers see nothing but the tokens before it, and draw nothing at random.
This imports no torch: the launching process asks too.
"""

from collections.abc import Iterator, Mapping

from verl.models.transformers.names import REMOTE_FAMILIES
from verl.models.transformers.own_loss import balancing_coefficient
from verl.models.transformers.packing import state_along_rows
from verl.utils.json_types import ConfigJson

_FULL = ("full_attention", "full")
_PARTS = ("text_config", "attn_config", "ffn_config")
"""Nodes of ``config.json`` that belong to the language model."""
_DRAWS_EXPERTS = ("phimoe",)
"""Families that choose experts at random while they train."""


def sharing_problems(config: ConfigJson, trains: bool = True) -> Iterator[str]:
    """Yield why rows of a model cannot share tokens, as the end of a sentence about the key.

    Args: config is that of ``config.json``, ``trains`` whether dropout is on.
    """
    text = {**config, **(config.get("text_config") or {})}
    kind = config.get("model_type")
    if kind in REMOTE_FAMILIES:
        yield f"is not supported for the remote code of model_type={kind!r}: write false"
    drawn = sorted(_drawn(config))
    if trains and kind in _DRAWS_EXPERTS:
        yield f"needs experts that a token determines, model_type={kind!r} draws them in training: write false"
    elif trains and drawn:
        name, rate = drawn[0]
        yield (
            f"needs {name}=0.0, it is {rate}: rows that share a token would share what is drawn for it. Set it in "
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
    if coefficient := balancing_coefficient(config):
        yield (
            f"would weigh shared tokens once in the balancing loss of experts (output_router_logits, coefficient "
            f"{coefficient}): set output_router_logits=false in override_config, or write false"
        )


def drawn_in_training(config: ConfigJson) -> list[str]:
    """Return the random draws per token that a config.json asks for in training but not in inference."""
    experts = [f"experts (model_type={kind})" for kind in _DRAWS_EXPERTS if config.get("model_type") == kind]
    return experts + [f"{name}={rate}" for name, rate in sorted(_drawn(config))]


def _drawn(config: ConfigJson) -> Iterator[tuple[str, float]]:
    """Yield the rates above 0 of random draws per token: dropout, and noise of routers."""
    for name, value in config.items():
        if name in _PARTS and isinstance(value, Mapping):
            yield from _drawn(value)
        elif isinstance(value, int | float) and value > 0 and _is_random(name):
            yield name, value


def _is_random(name: str) -> bool:
    ends = ("dropout", "dropout_prob", "dropout_rate", "_pdrop", "jitter_noise", "jitter_eps")
    return name.endswith(ends) and "classifier" not in name


def mcore_sharing_problems(
    config: ConfigJson,
    context_parallel_size: int,
    use_mbridge: bool,
    implementation: str = "local",
    overrides: ConfigJson | None = None,
    trains: bool = True,
) -> Iterator[str]:
    """Yield why rows of a model on Megatron-Core cannot share tokens, apart from ``sharing_problems``.

    Args:
        implementation: whose layers compute, ``local`` or ``transformer_engine``.
        overrides: ``override_transformer_config``.
        trains: whether dropout is on.
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
    fields = overrides or {}
    at = "megatron.override_transformer_config"
    dropouts = ("attention_dropout", "hidden_dropout") if trains else ()
    for name in (*dropouts, "moe_input_jitter_eps"):  # the latter is drawn without training, too
        if fields.get(name):
            yield (
                f"needs {at}.{name} to be left out, it is {fields[name]}: rows that share a token would share what is "
                "drawn for it. Do so, or write false"
            )
    capacity = fields.get("moe_expert_capacity_factor")
    if capacity is not None and capacity >= 0:
        yield (
            f"is not supported with {at}.moe_expert_capacity_factor={capacity}: experts would drop other "
            "tokens, as shared ones come once. Leave it out, or write false"
        )
    if fields.get("apply_rope_fusion"):
        yield (
            f"is not supported with {at}.apply_rope_fusion=true, whose kernel counts positions in each part of a row: "
            "leave it out, or write false"
        )
