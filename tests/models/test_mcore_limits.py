"""The launching process, which reads ``config.json``, reports the same limits as the engine for the loaded model."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from verl.base_config import ConfigError
from verl.errors import UnsupportedInput
from verl.models.mcore import supported_architectures
from verl.models.mcore.families import find_family
from verl.models.mcore_limits import LIMITS, VISION_LIMITS, model_limits
from verl.trainer.config.rules.megatron import config_fields
from verl.workers.config import HFModelConfig
from verl.workers.config.model import read_config_json

KINDS = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
}
QWEN = {"rope_theta": 1e6, "rope_scaling": None, "use_sliding_window": False, "sliding_window": 32768}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 10000,
        "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
        "max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    },
    "Glm4MoeForCausalLM": {
        "attention_bias": True, "head_dim": 128, "hidden_act": "silu", "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "use_qk_norm": True, "routed_scaling_factor": 2.5,
        "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
    },
    "LlamaForCausalLM": {
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "mlp_bias": False, "attention_bias": False,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192},
    },
    "MixtralForCausalLM": {"rope_theta": 1e6, "sliding_window": None, "router_jitter_noise": 0.0},
    "Qwen2ForCausalLM": QWEN, "Qwen2MoeForCausalLM": QWEN, "Qwen3ForCausalLM": QWEN, "Qwen3MoeForCausalLM": QWEN,
    **dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), QWEN | {
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }),
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), {
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        "rope_theta": 5000000, "attention_bias": False, "hidden_size": 2048, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }),
}  # fmt: skip
"""As in the files that were published with older versions of transformers."""


def llama3(**changes: Any) -> dict[str, Any]:
    return PUBLISHED["LlamaForCausalLM"]["rope_scaling"] | changes


YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
CHANGES: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 64},
    {"use_sliding_window": True, "sliding_window": None},
    {"sliding_window": 64},
    {"use_sliding_window": None, "sliding_window": 64},
    {"router_jitter_noise": 0.1},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"mlp_bias": True, "attention_bias": False},
    {"mlp_bias": True, "attention_bias": True},
    {"rope_interleave": False},
    {"norm_topk_prob": False},
    {"norm_topk_prob": False, "num_experts_per_tok": 1, "n_group": 1},
    {"num_experts_per_tok": 1},
    {"norm_topk_prob": True, "num_experts_per_tok": 1, "n_group": 1},
    {"routed_scaling_factor": 0.0},
    {"n_shared_experts": 0},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"sliding_window": 0},
    {"num_experts_per_tok": 6},
    {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 6},
    {"n_group": 4, "topk_group": 4, "num_experts_per_tok": 6},
    {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
    {"n_group": None, "topk_group": None, "num_experts_per_tok": 6},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e5},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": llama3()},
    {"rope_scaling": llama3(), "original_max_position_embeddings": 4096},
    {"rope_scaling": llama3(low_freq_factor=2.0), "max_position_embeddings": 65536},
    {"rope_scaling": {k: v for k, v in llama3().items() if not k.startswith("orig")}, "max_position_embeddings": 8192},
    {"rope_scaling": {k: v for k, v in llama3().items() if not k.startswith("orig")}, "max_position_embeddings": 4096},
    {"rope_scaling": {"type": "yarn", **YARN}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale_all_dim": 0.7}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}},
    {"rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 0.5}},
]


def of_engine(path: Path, overrides: dict[str, Any]) -> list[str] | None:
    """Return what the engine says of the model, at most one line; None where transformers takes no such file."""
    config = HFModelConfig(path=str(path), load_tokenizer=False, override_config=overrides)
    try:
        hf = config.hf_config
    except (ConfigError, StrictDataclassError):
        return None
    try:
        family = find_family(hf)
        family.config(hf)
        family.rope(hf)
    except UnsupportedInput as error:
        return [str(error)]
    return []


def before_start(path: Path, overrides: dict[str, Any]) -> list[str]:
    architecture = read_config_json(str(path))["architectures"][0]
    return [
        str(limit)
        for limit in model_limits(architecture, config_fields({"path": str(path), "override_config": overrides}))
    ]


def text_fields(architecture: str) -> dict[str, Any]:
    """Return the fields that transformers saves of the language model."""
    return AutoConfig.for_model(KINDS[architecture]).get_text_config().to_dict()


def write(folder: Path, architecture: str, content: dict[str, Any]) -> Path:
    """Write the file of a model with these fields of its language model."""
    named = {"model_type": KINDS[architecture], "architectures": [architecture]}
    if architecture in VISION_LIMITS:
        content = {"text_config": content, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(content | named))
    return folder


@pytest.mark.parametrize("architecture", sorted(LIMITS))
def test_models_that_run_are_taken(tmp_path: Path, architecture: str) -> None:
    saved = text_fields(architecture)
    for content in ({}, saved, PUBLISHED[architecture], saved | {"quantization_config": None}):
        path = write(tmp_path, architecture, content)
        assert of_engine(path, {}) == [] == before_start(path, {}), content


# ``override_config`` sets fields of a whole model, and does not reach those of a language model in ``text_config``.
WAYS = [(each, way) for each in sorted(LIMITS) for way in ("file", "overrides", "both")]
WAYS = [(each, way) for each, way in WAYS if way == "file" or each not in VISION_LIMITS]


@pytest.mark.parametrize(("architecture", "way"), WAYS)
def test_both_say_the_same(tmp_path: Path, architecture: str, way: str) -> None:
    """In a file, over one, and over one with the change before, which may be taken back."""
    saved = text_fields(architecture)
    older = {name: value for name, value in saved.items() if name != "rope_parameters"}
    base = saved if way == "overrides" else older
    before, refused = {}, 0
    for changes in CHANGES:
        in_file = {"file": changes, "overrides": {}, "both": before}[way]
        path, overrides = write(tmp_path, architecture, base | in_file), {} if way == "file" else changes
        expected, found = of_engine(path, overrides), before_start(path, overrides)
        if expected is not None:
            assert found[:1] == expected, (in_file, overrides)
            refused += len(expected)
        before = changes
    assert 5 <= refused < len(CHANGES)


@pytest.mark.parametrize("architecture", sorted(LIMITS.keys() - VISION_LIMITS))
def test_what_a_file_leaves_out_is_not_held_against_it(tmp_path: Path, architecture: str) -> None:
    before: dict[str, Any] = {}
    for changes in CHANGES:
        path = write(tmp_path, architecture, before)
        assert not before_start(path, changes) or of_engine(path, changes) != [], (before, changes)
        before = changes


def test_older_files_have_the_fields_of_the_language_model_at_the_top(tmp_path: Path) -> None:
    """As the published files of Qwen2.5-VL."""
    architecture = "Qwen2_5_VLForConditionalGeneration"
    named = {"model_type": KINDS[architecture], "architectures": [architecture], "vision_config": {}}
    for content, refused in ((PUBLISHED[architecture], False), ({"hidden_act": "gelu"}, True)):
        (tmp_path / "config.json").write_text(json.dumps(content | named))
        assert of_engine(tmp_path, {}) == before_start(tmp_path, {})
        assert bool(before_start(tmp_path, {})) == refused


def test_stacked_experts_of_either_layout_must_differ_in_shape(tmp_path: Path) -> None:
    architecture = "Qwen3VLMoeForConditionalGeneration"
    for width in (32, 64):
        path = write(tmp_path, architecture, {"hidden_size": 64, "moe_intermediate_size": width})
        assert of_engine(path, {}) == before_start(path, {}) != []


def test_the_families_are_those_with_limits() -> None:
    assert sorted(LIMITS) == supported_architectures() == sorted(KINDS)
