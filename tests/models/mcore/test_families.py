"""Families: fields from ``config.json`` cannot be overridden, and positions equal those of transformers."""

import pytest
from transformers import AutoConfig

from verl.errors import UnsupportedInput
from verl.models.mcore import families, supported_architectures
from verl.models.mcore.families import find_family
from verl.trainer.config.rules.megatron import OF_MODEL, OF_PRETRAINING

TRAINING = {"attention_dropout", "hidden_dropout", "moe_router_dtype", "moe_grouped_gemm", "attention_output_bias"}
"""What a family sets that is no part of what the model computes where it generates, or no field."""
KINDS = {
    "DeepseekV3": "deepseek_v3", "Glm4Moe": "glm4_moe", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe",
    "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "Qwen3VLMoe": "qwen3_vl_moe",
}  # fmt: skip


def config_of(architecture: str, **changes: object) -> object:
    name = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    return AutoConfig.for_model(KINDS.get(name, name.lower()), architectures=[architecture], **changes)


@pytest.mark.parametrize("architecture", supported_architectures())
def test_what_config_json_has_cannot_be_overridden(architecture: str) -> None:
    found = set(find_family(config_of(architecture)).config(config_of(architecture)))
    assert found - TRAINING <= {*OF_MODEL, *OF_PRETRAINING}


@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
    ],
)
def test_yarn_scales_as_in_transformers(scales: dict[str, float]) -> None:
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    hf = config_of("DeepseekV3ForCausalLM", rope_parameters=rope | scales)
    values = find_family(hf).config(hf)
    factor, both = values["rotary_scaling_factor"], (values["mscale"], values["mscale_all_dim"])
    rotated = yarn._yarn_get_concentration_factor(factor, *both)
    assert rotated == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")[1])
    scale = yarn._yarn_get_mscale(factor, both[1]) ** 2  # as MultiLatentAttention has it
    assert scale == pytest.approx(yarn_apply_mscale(hf.rope_parameters, 1.0))


def test_noise_of_a_router_is_refused() -> None:
    hf = config_of("MixtralForCausalLM", router_jitter_noise=0.1)
    with pytest.raises(UnsupportedInput, match="router_jitter_noise=0.1 is not supported"):
        find_family(hf).config(hf)


def test_positions_that_differ_are_refused() -> None:
    rope = {"factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    lone = config_of("DeepseekV3ForCausalLM", rope_parameters=rope | {"rope_type": "yarn", "mscale_all_dim": 1.0})
    with pytest.raises(UnsupportedInput, match="mscale_all_dim=1.0 and no mscale"):
        find_family(lone).config(lone)
    for kind in ("yarn", "dynamic", "longrope"):
        factors = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64} if kind == "longrope" else {}
        hf = config_of("LlamaForCausalLM", rope_parameters=rope | factors | {"rope_type": kind})
        with pytest.raises(UnsupportedInput, match=f"rope_scaling of type {kind}"):
            families.rope_arguments(hf)
