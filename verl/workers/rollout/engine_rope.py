"""RoPE scaling of an engine: parameters from which the engine computes the same frequencies as the actor.

vLLM and SGLang choose the frequencies of the types ``dynamic`` and ``longrope`` once for a run, each by another rule;
SGLang's ``longrope`` even by the longest request of a step, and wrongly at the boundary. Both get the frequencies that
transformers uses for a row as long as the context, and so do actor and reference (``rope_length``).
"""

import math
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypedDict

from verl.errors import WrongInput
from verl.models.transformers.names import LENGTH_ROPES
from verl.models.transformers.rope import has_length_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.workers.config import RolloutConfig

_ENGINES = ("vllm", "sglang")
_OF_ONE_AXIS = ("linear", "llama3", "longrope", "proportional")
"""Types that the engines do not have for positions of three axes."""
_KEY = "actor_rollout_ref.model.override_config.rope_scaling"


class RopeParameters(TypedDict, total=False):
    """The fields of ``rope_parameters``; each type of RoPE uses some of them."""

    rope_type: str
    type: str
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: list[int]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    attn_factor: float
    alpha: float
    mscale: float | None
    mscale_all_dim: float | None
    short_factor: list[float]
    long_factor: list[float]
    short_mscale: float
    long_mscale: float


def rope_length(config: "RolloutConfig", hf_config: "PretrainedConfig") -> int | None:
    """Return the length that selects the RoPE frequencies of all rows of a run; None if each row uses its own."""
    if config.name not in _ENGINES or not has_length_rope(hf_config):
        return None
    return int(config.context_length)


def engine_rope(
    engine: str, hf_config: "PretrainedConfig", context_length: int, spare_tokens: int = 0
) -> dict[str, Any]:
    """Return the fields of a model's configuration that an engine needs to compute RoPE as the actor does.

    Args: ``context_length`` is that of ``RolloutConfig``; the engine's may be longer by ``spare_tokens``.
    Raises: WrongInput for a scaling that the engine computes otherwise.
    """
    text = hf_config.get_text_config()
    fields = _text_fields(engine, text, context_length, spare_tokens)
    if text is hf_config or not fields:
        return fields
    return {next(name for name, value in vars(hf_config).items() if value is text): fields}


def _text_fields(engine: str, text: "PretrainedConfig", context_length: int, spare_tokens: int) -> dict[str, Any]:
    found = getattr(text, "rope_parameters", None)
    if not isinstance(found, Mapping):
        return {}
    is_nested = bool(found) and all(isinstance(each, Mapping | None) for each in found.values())
    by_layer: dict[str | None, Any] = (
        {name: each for name, each in found.items() if each} if is_nested else {None: found}
    )
    changed: dict[str | None, RopeParameters] = {}
    fields: dict[str, Any] = {}
    is_scaled = False
    for layer, parameters in by_layer.items():
        kind = parameters.get("rope_type", "default")
        is_scaled = is_scaled or kind not in ("default", "mrope")
        _check(engine, layer, kind, parameters, context_length)
        new = _parameters(engine, text, layer, kind, copy(parameters), context_length)
        # The chosen factors are written as short factors, so the short table must cover all positions.
        if kind == "longrope":
            new["original_max_position_embeddings"] = context_length + spare_tokens
            # Engines prefer this field to the one in the parameters.
            if getattr(text, "original_max_position_embeddings", None) is not None:
                fields["original_max_position_embeddings"] = context_length + spare_tokens
        if new != parameters:
            changed[layer] = new
    if changed:
        fields["rope_parameters"] = {**found, **changed} if is_nested else changed[None]
    positions = getattr(text, "max_position_embeddings", None)
    if is_scaled and positions is not None and context_length > positions:
        fields["max_position_embeddings"] = context_length + spare_tokens  # the size of the engine's table of angles
    return fields


def _check(engine: str, layer: str | None, kind: str, parameters: RopeParameters, context_length: int) -> None:
    """Raise WrongInput for a scaling that the engine does not have, or computes otherwise than transformers."""
    if kind in _OF_ONE_AXIS and "mrope_section" in parameters:
        raise WrongInput(
            f"{_KEY}.rope_type={kind}: {engine} has it for text models only, and this one has positions of three axes: "
            "write yarn or dynamic, or actor_rollout_ref.rollout.name=hf"
        )
    if kind == "proportional" and parameters.get("factor") not in (None, 1, 1.0):
        raise WrongInput(
            f"{_KEY}.factor={parameters['factor']}: {engine} ignores it for rope_type=proportional: leave it out, or "
            "write actor_rollout_ref.rollout.name=hf"
        )
    if kind == "proportional" and engine == "sglang" and layer is None:
        raise WrongInput(
            f"{_KEY}.rope_type=proportional: sglang computes it otherwise than transformers in a model with one RoPE "
            "for all layers: write actor_rollout_ref.rollout.name=vllm"
        )
    pretrained = parameters.get("original_max_position_embeddings")
    if kind == "yarn" and pretrained and parameters.get("factor"):
        positions = int(pretrained * parameters["factor"])
        if context_length > positions:
            raise WrongInput(
                f"the engine's context {context_length} exceeds the {positions} positions of yarn, "
                f"{_KEY}.original_max_position_embeddings={pretrained} x factor={parameters['factor']}: write "
                f"factor={math.ceil(context_length / pretrained)}, or a shorter prompt_length or response_length"
            )


def _parameters(
    engine: str, text: "PretrainedConfig", layer: str | None, kind: str, parameters: RopeParameters, length: int
) -> RopeParameters:
    """Return rope parameters that make the engine compute as transformers does for a row of ``length`` tokens."""
    scale = parameters.get("attention_factor")
    if kind == "yarn" and engine == "sglang" and scale is not None:
        del parameters["attention_factor"]
        parameters["attn_factor"] = scale / _yarn_scale(parameters)
        return parameters
    if kind not in LENGTH_ROPES:
        return parameters
    parameters.pop("type", None)
    if kind == "longrope":
        return _longrope(text, layer, parameters, length)
    if "alpha" in parameters:  # Hunyuan's own: all engines scale by it, whatever the length
        if length > text.max_position_embeddings:
            raise WrongInput(
                f"the engine's context {length} exceeds max_position_embeddings={text.max_position_embeddings}, beyond "
                f"which {engine} computes {_KEY}.rope_type=dynamic with alpha otherwise than transformers: shorten "
                "prompt_length or response_length, or write actor_rollout_ref.rollout.name=hf"
            )
        return parameters
    factor = parameters.pop("factor")
    return parameters | {"rope_type": "default", "rope_theta": dynamic_theta(text, parameters, factor, length)}


def dynamic_theta(text: "PretrainedConfig", parameters: RopeParameters, factor: float, length: int) -> float:
    """Return the base of the frequencies that transformers has for a row of ``length`` with ``dynamic`` scaling.

    Source: the scaling by the neural tangent kernel that YaRN describes (arXiv:2309.00071, section 3.1).
    """
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = int(head * parameters.get("partial_rotary_factor", 1.0))
    stretch = factor * max(length, text.max_position_embeddings) / text.max_position_embeddings - (factor - 1)
    return float(parameters["rope_theta"] * stretch ** (size / (size - 2)))


def _longrope(text: "PretrainedConfig", layer: str | None, parameters: RopeParameters, length: int) -> RopeParameters:
    """Return ``longrope`` parameters whose short and long factors both equal the factors for a row of ``length``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    is_long = length > parameters["original_max_position_embeddings"]
    chosen = parameters["long_factor" if is_long else "short_factor"]
    if text.model_type == "phimoe" and is_long:
        raise WrongInput(
            f"{_KEY}.rope_type=longrope: transformers computes model_type='phimoe' with the short factors beyond "
            f"original_max_position_embeddings={parameters['original_max_position_embeddings']} too, and the engine "
            "does not: write an actor_rollout_ref.rollout.max_model_len of at most that"
        )
    if text.model_type == "phimoe":  # the only one whose code reads a scale from the file
        scale = parameters["short_mscale"]
    else:
        scale = ROPE_INIT_FUNCTIONS["longrope"](text, layer_type=layer)[1]
    return parameters | {
        "short_factor": chosen,
        "long_factor": chosen,
        "short_mscale": float(scale),
        "long_mscale": float(scale),
    }


def _yarn_scale(parameters: RopeParameters) -> float:
    """Return the factor by which SGLang multiplies ``attn_factor``.

    Source: YaRN (arXiv:2309.00071), section 3.4, with the two weights of DeepSeek-V2.
    """
    factor = float(parameters["factor"])

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above = parameters.get("mscale")
    below = parameters.get("mscale_all_dim")
    return of(above) / of(below) if above is not None and below is not None else of(1.0)
