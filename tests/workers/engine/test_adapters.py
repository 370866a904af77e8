"""LoRA on every module of every family: the model that trains is the one that is sent and merged."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from verl.workers.engine.fsdp.adapters import add_adapters, merged_weights

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Experts that peft knows and does not know, in both layouts; dense layers and shared experts whose names routed
# experts have too; layers that are no attention.
FAMILIES = ["qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "granitemoe", "phimoe", "jamba"]
IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def tiny_config(family: str, **changes: Any) -> Any:
    config_class = transformers.CONFIG_MAPPING[family]
    known = config_class()
    latent = {"num_key_value_heads": 4} if hasattr(known, "kv_lora_rank") else {}
    return config_class(**{key: value for key, value in TINY.items() if hasattr(known, key)} | latent | changes)


def tiny(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model


def adapted(model: Any, targets: Any, **changes: Any) -> Any:
    values = {"lora_rank": 2, "lora_alpha": 4, "target_modules": targets, "exclude_modules": None, "path": "tiny"}
    wrapped = add_adapters(model, SimpleNamespace(**values | changes))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return wrapped


def log_probs(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits.log_softmax(-1)


def assert_merged_is_trained(family: str, targets: Any, **changes: Any) -> Any:
    plain = tiny(family, **changes)
    before = log_probs(plain).detach()
    wrapped = adapted(tiny(family, **changes), targets)
    trained = log_probs(wrapped)
    assert (trained - before).abs().max() > 1e-2  # the adapters matter
    with torch.no_grad():
        result = plain.load_state_dict(dict(merged_weights(wrapped)), strict=False)
        assert not result.unexpected_keys
        # fp32 sums in another order: W x + B (A x) against (W + B A) x
        torch.testing.assert_close(log_probs(plain), trained.detach(), atol=1e-4, rtol=1e-4)
    return wrapped


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_that_trains_is_the_one_that_is_merged(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        wrapped = assert_merged_is_trained(family, "all-linear")
    base = wrapped.get_base_model()
    head = base.get_output_embeddings().weight
    weights = [p for n, p in base.named_parameters() if p.dim() > 1 and "lora_" not in n and "bias" not in n]
    embeddings = [m.weight for m in base.modules() if isinstance(m, torch.nn.Embedding)]
    plain = [p for p in weights if p is not head and not any(p is e for e in embeddings)]
    told = caplog.text.partition("leaves out ")[2].split("\n")[0].split(", ")
    left = {"granitemoe": 2, "gpt_oss": 2, "phimoe": 2, "jamba": 6}.get(family, 0)  # routers; of Mamba what is no layer
    count = sum(1 for name, _ in wrapped.named_parameters() if "lora_A" in name)
    assert count == len(plain) - left and (not left) == (told == [""])


def causal_families() -> list[str]:
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name in names if name not in FAMILIES]


@pytest.mark.full
@pytest.mark.parametrize("family", causal_families())
def test_every_family_merges_what_it_trains(family: str) -> None:
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
        assert sum(parameter.numel() for parameter in model.parameters()) < 1e7
        log_probs(tiny(family))
    except Exception as error:  # whatever its configuration raises: the family takes other names of sizes
        pytest.skip(f"no tiny model: {type(error).__name__}")
    try:
        assert_merged_is_trained(family, "all-linear")
    except ValueError as error:
        assert "incompatible with Mamba-based models" in str(error), error


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_embedding_and_head(target: str, tied: bool) -> None:
    if not tied:
        assert_merged_is_trained("qwen2", [target, "q_proj"], tie_word_embeddings=False)
        return
    with pytest.raises(ValueError, match=r"lm_head and model\.embed_tokens are one tensor"):
        adapted(tiny("qwen2", tie_word_embeddings=True), [target, "q_proj"])


def test_names_mean_every_layer_of_that_name() -> None:
    wrapped = assert_merged_is_trained("glm4_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"])
    names = {name.partition(".lora_A")[0] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    layers = "base_model.model.model.layers"
    assert f"{layers}.0.mlp.down_proj" in names and f"{layers}.1.mlp.shared_experts.down_proj" in names
    assert f"{layers}.1.mlp.experts" in names and f"{layers}.1.self_attn.q_proj" in names
    assert not any("o_proj" in name for name in names)


def test_one_name_is_a_list() -> None:
    wrapped = adapted(tiny("qwen2"), "q_proj")
    names = [name for name, _ in wrapped.named_parameters() if "lora_A" in name]
    assert len(names) == 2 and all("q_proj" in name for name in names)


def test_an_excluded_layer_stays_excluded() -> None:
    wrapped = adapted(tiny("glm4_moe"), "all-linear", exclude_modules=["shared_experts.down_proj"])
    assert not any("shared_experts.down_proj.lora" in name for name, _ in wrapped.named_parameters())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="names 'qproj', which the model does not have: its linear layers are down_proj"
    ):
        adapted(tiny("qwen2"), ["qproj", "v_proj"])


@pytest.mark.parametrize(
    ("family", "name"), [("jamba", "dt_proj"), ("longcat_flash", "classifier"), ("phimoe", "router")]
)
def test_a_layer_that_an_adapter_would_pass_by_is_refused(family: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"names model\.layers\.0\.\S+{name}, which cannot be adapted"):
        adapted(tiny(family), ["q_proj", name])
