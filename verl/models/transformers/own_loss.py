"""Terms that a model of transformers adds to its own loss, besides the likelihood of the tokens.

This imports no torch: the launching process asks too. Written for transformers 5.19.
"""

from collections.abc import Iterator

from verl.utils.json_types import ConfigJson, Json


def balancing_coefficient(config: ConfigJson) -> float:
    """Return the weight of the balancing loss of experts that a config.json asks for; 0.0 if it asks for none.

    A family that returns the logits of its routers and adds no loss may have a weight, too.
    """
    text = {**config, **(config.get("text_config") or {})}
    if not text.get("output_router_logits"):
        return 0.0
    names = (text.get("router_aux_loss_coef"), text.get("aux_loss_coef"))  # the second is JetMoE's
    of_dbrx = (text.get("ffn_config") or {}).get("moe_loss_weight")
    return float(next((value for value in (*names, of_dbrx) if value is not None), 0.0))


def loss_problems(config: ConfigJson, strategy: str) -> Iterator[tuple[str, Json, str]]:
    """Yield the field, its value and the fault of each term that a policy on an engine cannot be trained with."""
    if weight := config.get("z_loss_coefficient"):
        fault = "asks for a loss over the logits of all tokens, which the engines do not make: set it to 0.0"
        yield "z_loss_coefficient", weight, fault
    coefficient = balancing_coefficient(config)
    if coefficient and strategy == "megatron":
        fault = (
            f"asks for the balancing loss of experts (coefficient {coefficient}), which strategy=megatron does not "
            "have: set it to false, or use strategy=fsdp"
        )
        yield "output_router_logits", True, fault
