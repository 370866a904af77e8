"""What a forward reads of config.json decides whether a model is another one; how it is written does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from verl.utils.checkpoint.files import LAYOUT_NAME
from verl.utils.checkpoint.model_fields import FIELDS_KEY, fields_problem, forward_fields, start_problem

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
IN_PARTS = {
    "model_type": "qwen2_5_vl",
    "text_config": SIZES | {"max_position_embeddings": 4096, "rope_theta": 1e6},
    "vision_config": {"depth": 1, "hidden_size": 32},
}


def fields(folder: Path, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    whole = {"model_type": kind} | ({} if "text_config" in content else SIZES) | content
    (folder / "config.json").write_text(json.dumps(whole))
    return forward_fields(None, transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("qwen2", {"rope_theta": 10000}, {"rope_theta": 10000.0}),
        ("qwen2", {}, {"rope_theta": 10000.0, "rope_scaling": None}),
        ("qwen2", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn"} | YARN},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5} | YARN},
        ),
        ("gemma3_text", {}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("qwen2", {}, {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_dropout": 0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}, {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1}, {"max_window_layers": 2}),
        ("mistral", {"head_dim": None}, {"head_dim": 16}),
        ("qwen2", {"hidden_act": "silu"}, {"hidden_act": "swish"}),
        ("qwen2", {"max_position_embeddings": 2048}, {"max_position_embeddings": 4096}),
        ("qwen2_5_vl", IN_PARTS, IN_PARTS | {"text_config": IN_PARTS["text_config"] | {"max_position_embeddings": 99}}),
        (
            "qwen2_5_vl",
            IN_PARTS,
            IN_PARTS | {"text_config": IN_PARTS["text_config"] | {"rope_scaling": {"type": "mrope"}}},
        ),
        (
            "qwen2",
            {"use_cache": True, "torch_dtype": "bfloat16", "architectures": ["A"], "transformers_version": "4.2"},
            {"use_cache": False, "dtype": "float16", "architectures": ["B"], "_name_or_path": "x", "top_p": 0.5},
        ),
        ("qwen2", {"tokenizer_class": "A", "task_specific_params": {"a": 1}, "eos_token_id": 3}, {"pad_token_id": 4}),
    ],
)
def test_the_same_values_are_the_same_model(
    tmp_path: Path, kind: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    (tmp_path / "huggingface").mkdir()
    first = fields(tmp_path / "huggingface", kind, one)
    (tmp_path / LAYOUT_NAME).write_text(json.dumps({FIELDS_KEY: first}))
    second = fields(tmp_path, kind, other)
    assert fields_problem(first, second) is None and fields_problem(second, first) is None
    assert start_problem(tmp_path, json.loads((tmp_path / "config.json").read_text())) is None


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen2", {"rope_theta": 5e5}, "rope_parameters.rope_theta=500000.0, and 10000.0"),
        ("qwen2", {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001, and 1e-06"),
        ("qwen2", {"tie_word_embeddings": True}, "tie_word_embeddings=true, and false"),
        ("qwen2", {"hidden_act": "gelu"}, 'hidden_act="gelu", and "silu"'),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types=["),
        ("mistral", {"sliding_window": 8}, "sliding_window=8, and 4096"),
        ("mistral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type="linear", and "default"'),
        ("llama", {"rope_scaling": {"type": "yarn"} | YARN}, 'rope_type="yarn", and "default"'),
        ("granite", {"attention_multiplier": 0.5}, "attention_multiplier=0.5, and 1.0"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling=8.0, and 1.0"),
        ("granite", {"residual_multiplier": 0.2}, "residual_multiplier=0.2, and 1.0"),
        ("qwen3_moe", {"num_experts_per_tok": 4}, "num_experts_per_tok=4, and 8"),
        ("qwen3_moe", {"norm_topk_prob": True}, "norm_topk_prob=true, and false"),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, "routed_scaling_factor=1.0, and 2.5"),
        ("gemma3_text", {"rope_local_base_freq": 5e4}, "sliding_attention.rope_theta=50000.0, and 10000.0"),
        ("gemma3_text", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64, and 256"),
        ("gemma2", {"final_logit_softcapping": 10.0}, "final_logit_softcapping=10.0, and 30.0"),
        ("cohere", {"logit_scale": 1.0}, "logit_scale=1.0, and 0.0625"),
        ("qwen2_5_vl", {"text_config": SIZES | {"rope_theta": 5.0}}, "text_config.rope_parameters.rope_theta=5.0"),
        ("qwen2_5_vl", {"text_config": SIZES, "vision_config": {"window_size": 7}}, "vision_config.window_size=7"),
    ],
)
def test_another_value_is_another_model(tmp_path: Path, kind: str, changes: dict[str, Any], named: str) -> None:
    usual = {"text_config": SIZES} if "text_config" in changes else {}
    saved, own = (fields(tmp_path, kind, content) for content in (usual, changes))
    problem = fields_problem(saved, own)
    assert problem is not None and named in problem and "in the checkpoint" in problem


def test_positions_count_where_their_frequencies_depend_on_them(tmp_path: Path) -> None:
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    saved, own = (fields(tmp_path, "llama", content) for content in (dynamic, dynamic | {"max_position_embeddings": 8}))
    assert "max_position_embeddings=8, and 64" in str(fields_problem(saved, own))
