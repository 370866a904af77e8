"""Terms of a model's own loss, by the fields of its configuration."""

from typing import Any

import pytest
from transformers import AutoConfig

from verl.models.transformers.own_loss import balancing_coefficient, loss_problems
from verl.trainer.config.rules.model import loss_rules

ON = {"output_router_logits": True}


def fields(kind: str, **changes: Any) -> dict[str, Any]:
    return AutoConfig.for_model(kind, **changes).to_dict()


@pytest.mark.parametrize(
    ("config", "coefficient"),
    [
        (fields("mixtral"), 0.0),
        (fields("mixtral", **ON), 0.001),
        (fields("olmoe", **ON), 0.01),
        (fields("mixtral", router_aux_loss_coef=0.0, **ON), 0.0),
        (fields("jetmoe", **ON, aux_loss_coef=0.3), 0.3),
        (fields("dbrx", **ON, ffn_config={"moe_loss_weight": 0.2}), 0.2),
        (fields("qwen3_vl_moe", text_config=ON | {"router_aux_loss_coef": 0.4}), 0.4),
        (fields("deepseek_v3", **ON), 0.0),
        (fields("qwen2"), 0.0),
        ({}, 0.0),
    ],
)
def test_coefficient(config: dict[str, Any], coefficient: float) -> None:
    assert balancing_coefficient(config) == coefficient


def test_what_an_engine_does_not_compute() -> None:
    assert list(loss_problems(fields("mixtral", **ON), "fsdp")) == []
    ((name, value, fault),) = loss_problems(fields("mixtral", **ON), "megatron")
    assert (name, value) == ("output_router_logits", True) and "coefficient 0.001), which strategy=megatron" in fault
    assert [name for name, _, _ in loss_problems(fields("bamba", z_loss_coefficient=0.1), "fsdp")] == [
        "z_loss_coefficient"
    ]


def test_launching_process_refuses_them() -> None:
    node = {"override_config": ON | {"router_aux_loss_coef": 5.0}}
    (violation,) = loss_rules(node, "actor_rollout_ref.model", fields("qwen3_moe"), "megatron")
    assert str(violation).startswith("actor_rollout_ref.model.override_config.output_router_logits=true: asks for")
    assert list(loss_rules(node, "actor_rollout_ref.model", fields("qwen3_moe"), "fsdp2")) == []
    assert list(loss_rules({"override_config": None}, "model", {}, "megatron")) == []
