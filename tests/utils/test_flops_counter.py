"""FLOPs against the parameters that transformers builds, and the pairs that attention compares."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.utils import flops_counter
from verl.utils.flops_counter import FlopsCounter, get_device_flops

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50,
         "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
FAMILIES = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "apertus": {"head_dim": 8},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
                    "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 4, "num_experts_per_tok": 4,
                    "n_shared_experts": 1, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 2,
                    "topk_group": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_formula_equals_the_weights_that_are_built(family):
    """All experts are active, so that every matrix of the model multiplies every token."""
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if family == "apertus":  # and the norms of queries and keys
        matrices += sum(p.numel() for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n)
    lengths = [3, 7]
    layers, heads = 3, 4
    head_dim = 10 if family == "deepseek_v3" else getattr(config, "head_dim", None) or 8
    pairs = layers * (9 + 49)
    if family == "gemma3_text":  # two layers look back 4 tokens
        pairs = (9 + 49) + 2 * (3 * 3 + 7 * 4)
    want = 6 * matrices * 10 + 12 * pairs * heads * head_dim
    achieved, promised = FlopsCounter(config).estimate_flops(lengths, delta_time=2.0)
    assert achieved * 2e12 == pytest.approx(want, rel=1e-9)
    assert promised > 0


def test_nested_text_config_and_unknown_families(caplog):
    class Config:
        model_type = "qwen2_5_vl"
        text_config = AutoConfig.for_model("qwen2", **SMALL)

    plain = FlopsCounter(Config.text_config).estimate_flops([5], 1.0)
    assert FlopsCounter(Config()).estimate_flops([5], 1.0) == plain

    class Unknown:
        model_type = "mystery"

    assert FlopsCounter(Unknown()).estimate_flops([5], 1.0)[0] == 0
    assert "'mystery'" in caplog.text
    assert FlopsCounter(Config()).estimate_flops([5], 0.0)[0] == 0


@pytest.mark.parametrize("name, tflops", [("cpu", 0.448), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
                                          ("NVIDIA L40S", 362.05),
                                          ("NVIDIA L40", 181.05), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250),
                                          ("NVIDIA A100-SXM4-80GB", 312), ("Unheard of", float("inf"))])  # fmt: skip
def test_promised_flops(name, tflops, monkeypatch):
    assert get_device_flops(name) == tflops
    monkeypatch.setattr(flops_counter, "get_device_name", lambda: "cpu")
    assert get_device_flops() == 0.448
