"""Every option of a family's configuration gives what transformers computes, or is refused by name.

Biases and norms are far from the values with which models begin, where an option that is lost would not show.
Tolerance: 2e-5 for log-probabilities, and relative for the norm of the gradient. These are fp32 sums in another order;
the largest differences found are 2e-6. A lost option changed 0.3 nats or more.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.engine import cases, megatron_cases, vision_cases
from verl.base_config import WrongInput

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

ATOL = 2e-5
SHAPE = {name: value for name, value in cases.tiny_config().to_dict().items() if name in cases.SHARED}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": SIGMOID | LATENT,
    "Glm4Moe": SIGMOID | {"head_dim": 16},
}


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | changes}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"sliding_window": 4, "max_window_layers": 1}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
OPTIONS: list[dict[str, Any]] = [
    {},
    *({"tie_word_embeddings": True}, {"rms_norm_eps": 0.1}, {"vocab_size": 101}, {"pad_token_id": 5}),
    *({"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}),
    *({"qkv_bias": True}, {"qkv_bias": False}),
    *({"head_dim": 24}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"num_hidden_layers": 1}),
    *({"hidden_act": kind} for kind in ("gelu", "gelu_pytorch_tanh", "relu")),
    *({"intermediate_size": 40}, {"max_position_embeddings": 8}),
    *(rope(rope_theta=100.0), rope(partial_rotary_factor=0.5), {"partial_rotary_factor": 0.5}),
    *(rope(rope_type="linear", factor=3.0), rope(rope_type="linear", factor=3.0, partial_rotary_factor=0.5)),
    *(rope(rope_type="llama3", factor=4.0, original_max_position_embeddings=each, **LLAMA3) for each in (16, 8192)),
    *(rope(**YARN), rope(rope_type="dynamic", factor=4.0)),
    *({"use_sliding_window": switch} | WINDOW | MIXED for switch in (True, False)),
    *({"use_sliding_window": True} | WINDOW, WINDOW, {"sliding_window": 0}),
    *({"final_logit_softcapping": 2.0}, {"attn_logit_softcapping": 1.0}, {"logits_scaling": 3.0}, {"logit_scale": 0.3}),
]
OF_EXPERTS: list[dict[str, Any]] = [
    *({"num_experts_per_tok": each} for each in (1, 3, 4)),
    *({"num_experts_per_tok": each, "norm_topk_prob": True} for each in (1, 2, 4)),
    *({"num_experts_per_tok": each, "norm_topk_prob": False} for each in (1, 2, 4)),
    *({"routed_scaling_factor": each} for each in (3.0, 0.0, -1.5)),
    *({"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"router_jitter_noise": 0.1}),
    *({"first_k_dense_replace": each} for each in (0, 2)),
    *({"n_shared_experts": each} for each in (0, 3)),
    *({"shared_expert_intermediate_size": 16}, {"moe_intermediate_size": 16}, {"num_experts": 0}),
    *({"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"seq_aux": True}, {"num_nextn_predict_layers": 2}),
]
OF_SIGMOID: list[dict[str, Any]] = [
    {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": each, "norm_topk_prob": normed}
    for groups, chosen, each in ((1, 1, 3), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 3), (4, 2, 4), (4, 2, 2), (4, 3, 6))
    for normed in (True, False)
]
OF_FAMILY: dict[str, list[dict[str, Any]]] = {
    "DeepseekV3": [
        *({"q_lora_rank": None}, {"q_lora_rank": 16}, {"kv_lora_rank": 40}, {"rope_interleave": False}),
        *({"v_head_dim": 20}, {"qk_nope_head_dim": 8}),
        *(rope(**YARN, mscale=each) for each in (0.5, 0)),
        *(rope(**YARN, mscale=0.5, mscale_all_dim=each) for each in (0, 0.7, -1.0)),
        *(rope(**YARN, beta_fast=8, beta_slow=2), rope(**YARN, attention_factor=1.0), rope(**YARN, truncate=False)),
        rope(**YARN | {"factor": 0.5}, mscale=1.0, mscale_all_dim=1.0),
    ],
    "Glm4Moe": [
        *({"use_qk_norm": True}, {"use_qk_norm": True, "attention_bias": True}),
        *(rope(partial_rotary_factor=each) for each in (0.25, 0.3, 0.8, 1.0)),
    ],
}


def options_of(family: str) -> list[dict[str, Any]]:
    sigmoid = family in ("DeepseekV3", "Glm4Moe")
    experts = OF_EXPERTS if "num_experts_per_tok" in FAMILIES[family] else []
    return OPTIONS + experts + (OF_SIGMOID if sigmoid else []) + OF_FAMILY.get(family, [])


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    yield
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def write_model(folder: Path, family: str, options: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family] | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)


def compare(folder: Path, family: str, options: dict[str, Any]) -> str | None:
    """Compare with transformers; returns why the options were refused, None if they are the same.

    Options with which transformers itself computes nothing are the same.
    """
    try:
        write_model(folder, family, options)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        total, output, _ = cases.reference_loss(model)
    except (RuntimeError, TypeError, ValueError):
        return None
    total.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    try:
        engine: Any = megatron_cases.build(folder, {})
    except WrongInput as error:
        return str(error)
    data = cases.batch(**cases.MICRO[4])
    with engine.eval_mode():
        found = engine.infer_batch(data)["log_probs"]
    assert float((found - output["log_probs"]).detach().abs().max()) < ATOL
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, cases.loss_fn)
        engine.optimizer.prepare_grads()
        assert float(engine.optimizer.get_grad_norm()) == pytest.approx(norm, rel=ATOL)
    return None


LONE = "num_experts_per_tok=1 with a normalised weight (norm_topk_prob) is not supported"


@pytest.mark.parametrize(
    ("family", "options", "refused"),
    [
        ("Glm4Moe", {"num_experts_per_tok": 1}, LONE),
        ("Glm4Moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, None),
        ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, LONE),
        ("Mixtral", {"num_experts_per_tok": 1, "norm_topk_prob": False}, LONE),
        ("Mixtral", {"norm_topk_prob": False}, None),
        ("Qwen2Moe", {"use_sliding_window": False} | WINDOW | MIXED, "layer_types="),
        ("DeepseekV3", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 is not supported"),
        ("Qwen2", {"attention_bias": True, "mlp_bias": True}, None),
    ],
)
def test_options_that_were_computed_otherwise(
    tmp_path: Path, family: str, options: dict[str, Any], refused: str | None
) -> None:
    found = compare(tmp_path, family, options)
    assert (found is None) == (refused is None) and (refused or "") in (found or ""), found


@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["DeepseekV3", "Glm4Moe", "Mixtral", "Qwen2Moe", "Qwen3Moe"]),
    each=st.integers(1, 4),
    normed=st.booleans(),
    groups=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_any_router(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    each: int,
    normed: bool,
    groups: tuple[int, int],
    scale: float,
) -> None:
    options = {"num_experts_per_tok": each, "norm_topk_prob": normed, "routed_scaling_factor": scale}
    names = dict(zip(("n_group", "topk_group"), groups, strict=True))
    compare(tmp_path_factory.mktemp("router"), family, options | names)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option(tmp_path: Path, family: str) -> None:
    for number, options in enumerate(options_of(family)):
        try:
            compare(tmp_path / str(number), family, options)
        except Exception as error:
            raise AssertionError(f"{family} with {options}: {error}") from error


# Vision-language models, on rows of text whose three axes of positions differ


OF_VISION: list[dict[str, Any]] = [
    *({}, {"rms_norm_eps": 0.1}, {"tie_word_embeddings": True}, {"pad_token_id": 5}),
    *({"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": False}),
    *({"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"hidden_act": "gelu"}),
    {"head_dim": 24} | rope(mrope_section=[4, 4, 4]),
    *(rope(rope_theta=100.0), rope(mrope_section=[3, 3, 2]), rope(partial_rotary_factor=0.5)),
    *(rope(mrope_interleaved=each) for each in (True, False)),
    *(rope(rope_type="linear", factor=3.0), rope(**YARN), WINDOW, {"use_sliding_window": True} | WINDOW),
    *({"use_sliding_window": switch} | WINDOW | MIXED for switch in (True, False)),
]
OF_VISION_EXPERTS: list[dict[str, Any]] = [
    *({"num_experts_per_tok": each} for each in (1, 4)),
    *({"norm_topk_prob": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"moe_intermediate_size": 40}),
]


def compare_vision(folder: Path, family: str, options: dict[str, Any]) -> None:
    """Compare log-probabilities with transformers, unless the options are refused or transformers computes nothing."""
    config = vision_cases.vision_config(family)
    fields = config.to_dict()
    text = fields["text_config"]
    positions = text["rope_parameters"] | options.get("rope_parameters", {})
    fields["text_config"] = {name: value for name, value in text.items() if name != "layer_types"}
    fields["text_config"] |= options | {"rope_parameters": positions}
    data = cases.batch(**cases.MICRO[4])
    ids = data.batch["input_ids"]
    ids = ids.where(ids < 80, 10)  # others stand for images
    axes = data.batch["position_ids"].unsqueeze(1).expand(-1, 3, -1)
    axes = torch.stack([axes[:, 0], 2 * axes[:, 1], 2 * axes[:, 2] + 1], dim=1)
    data.batch.update({"input_ids": ids, "responses": ids[:, cases.PROMPT :], "position_ids": axes})
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForImageTextToText.from_config(type(config)(**fields), dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder)
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            mask = data.batch["attention_mask"]
            logits = model(input_ids=ids, attention_mask=mask, position_ids=axes.transpose(0, 1)).logits
        engine: Any = megatron_cases.build(folder, {"forward_only": True})
    except (RuntimeError, TypeError, ValueError):
        return
    scores = torch.log_softmax(logits[:, cases.PROMPT - 1 : -1] / cases.TEMPERATURE, dim=-1)
    expected = scores.gather(-1, data.batch["responses"].unsqueeze(-1)).squeeze(-1) * data.batch["response_mask"]
    with engine.eval_mode():
        found = engine.infer_batch(data)["log_probs"]
    assert float((found - expected).abs().max()) < ATOL


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_every_option_of_vision(tmp_path: Path, family: str) -> None:
    experts = OF_VISION_EXPERTS if family == "qwen3_vl_moe" else []
    for number, options in enumerate(OF_VISION + experts):
        try:
            compare_vision(tmp_path / str(number), family, options)
        except Exception as error:
            raise AssertionError(f"{family} with {options}: {error}") from error
