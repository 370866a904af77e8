"""Which models take packed rows and shared tokens: the fields of transformers' own configurations decide."""

from typing import Any

import pytest
from transformers import AutoConfig

from verl.models.transformers.packing import packing_problem
from verl.models.transformers.prefix_sharing import drawn_in_training, sharing_problems

STATES = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba2", "minimax", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba2"),
)
WINDOWS = ("gemma3_text", "gpt_oss", "cohere2")
PLAIN = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "phi3", "qwen2_5_vl")


def fields(kind: str, **changes: Any) -> dict[str, Any]:
    return AutoConfig.for_model(kind).to_dict() | changes


@pytest.mark.parametrize("kind", STATES)
def test_a_state_does_not_pass_from_row_to_row(kind: str) -> None:
    config = fields(kind)
    assert "would carry states from one row into the next" in (packing_problem(config) or "")
    assert "needs attention in all layers" in " ".join(sharing_problems(config))
    assert packing_problem({"model_type": "a_vision_model", "text_config": config}) is not None


@pytest.mark.parametrize("kind", ["bloom", "stablelm", "xglm", "gptj"])
def test_attention_that_is_not_told_where_rows_begin(kind: str) -> None:
    assert "would let rows attend to each other" in (packing_problem(fields(kind)) or "")


@pytest.mark.parametrize("kind", WINDOWS + PLAIN)
def test_attention_is_told_where_rows_begin(kind: str) -> None:
    config = fields(kind)
    assert packing_problem(config) is None
    problems = list(sharing_problems(config, trains=False))
    assert problems == [] if kind in PLAIN else "layers of type sliding_attention" in problems[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            fields("qwen3_moe", output_router_logits=True),
            "in the balancing loss of experts (output_router_logits, coefficient 0.001)",
        ),
        ({"model_type": "kimi_vl"}, "remote code of model_type='kimi_vl'"),
        (fields("qwen2", attention_dropout=0.1), "needs attention_dropout=0.0, it is 0.1"),
        (fields("gpt2"), "needs attn_pdrop=0.0"),
        (fields("mixtral", router_jitter_noise=0.1), "needs router_jitter_noise=0.0, it is 0.1"),
        (fields("phimoe"), "model_type='phimoe' draws them in training"),
        (fields("dbrx", resid_pdrop=0.0, attn_config={"attn_pdrop": 0.2}), "needs attn_pdrop=0.0, it is 0.2"),
        ({"model_type": "mistral", "sliding_window": 8}, "the model has sliding_window=8"),
    ],
)
def test_models_whose_rows_share_nothing(config: dict[str, Any], message: str) -> None:
    (problem,) = sharing_problems(config)
    assert message in problem
    assert list(sharing_problems(fields("qwen3_moe", output_router_logits=False))) == []


@pytest.mark.parametrize(
    ("config", "drawn"),
    [
        (fields("qwen2"), []),
        (fields("qwen2", attention_dropout=0.1), ["attention_dropout=0.1"]),
        (fields("mixtral", router_jitter_noise=0.2), ["router_jitter_noise=0.2"]),
        (fields("dbrx", resid_pdrop=0.0, attn_config={"attn_pdrop": 0.2}), ["attn_pdrop=0.2"]),
        (fields("phimoe", router_jitter_noise=0.0, input_jitter_noise=0.0), ["experts (model_type=phimoe)"]),
    ],
)
def test_what_training_draws(config, drawn):
    assert drawn_in_training(config) == drawn
