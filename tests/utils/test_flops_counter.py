"""FLOPs against what torch counts in a pass forward and backward of the model that transformers builds."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

from verl.utils import flops_counter
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.workers.engine.fsdp.adapters import adapter_sizes, add_adapters

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": False}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {"num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
            "v_head_dim": 7, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
            "moe_intermediate_size": 20, "first_k_dense_replace": 1, "topk_group": 2}  # fmt: skip


class LoraSettings(SimpleNamespace):
    """What adapters are made of."""

    path, lora_alpha, target_modules, exclude_modules = "", 16, "all-linear", None


LENGTH, ROWS, TOLERANCE = 12, 2, 0.02
WINDOW = {"sliding_window": LENGTH, "head_dim": 16}  # no token is further back: eager attention computes all pairs
FAMILIES = {
    "llama": ("llama", {"head_dim": 16}),
    "llama of wide heads": ("llama", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", WINDOW),
    "gemma3_text": ("gemma3_text", WINDOW),
    "apertus": ("apertus", {"head_dim": 8}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8}),
    "qwen3_moe every second layer": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW}),
    "glm4_moe": ("glm4_moe", {**DEEPSEEK, "num_key_value_heads": 2, "head_dim": 16}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 12}),
    "deepseek_v3 without latent queries": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None}),
}


def counted(model, **inputs):
    """Return the operations that torch counts in the products of matrices, one after another as they are called."""
    if hasattr(model.config.get_text_config(), "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def counted_forward(model, **inputs):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    return counter.get_total_flops()


def estimated(config, lengths, images=(), forward_only=False, **options):
    seconds = 2.0
    achieved, promised = FlopsCounter(config, **options).estimate_flops(lengths, seconds, images, forward_only)
    assert promised > 0
    return achieved * seconds * 1e12


@pytest.mark.parametrize("name", FAMILIES)
def test_text_models_are_counted_as_torch_counts_them(name):
    torch.manual_seed(0)
    family, options = FAMILIES[name]
    config = AutoConfig.for_model(family, **{**SMALL, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    want = counted(model, input_ids=torch.randint(0, 256, (ROWS, LENGTH)))
    assert estimated(config, [LENGTH] * ROWS) == pytest.approx(want, rel=TOLERANCE)
    assert estimated(config, [LENGTH] * ROWS, forward_only=True) == pytest.approx(want / 3, rel=TOLERANCE)


def test_packed_rows_count_as_padded_ones():
    """What is between rows, or behind them, is no work of the model."""
    config = AutoConfig.for_model("qwen2", **SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    alone = sum(counted(model, input_ids=torch.zeros(1, length, dtype=torch.long)) for length in (3, 12, 7))
    assert estimated(config, [3, 12, 7]) == pytest.approx(alone, rel=TOLERANCE)


def reach_first_layer(model):
    """Let gradients pass through the first layer as through the others, which a deep model does not notice."""
    visual = getattr(model.model, "visual", None)
    learns = visual is not None and any(parameter.requires_grad for parameter in visual.parameters())
    for module in [model.get_input_embeddings(), *([visual.patch_embed] if learns else [])]:
        module.register_forward_hook(lambda module, given, output: output.requires_grad_(True))


@pytest.mark.parametrize("rank", [2, 16])
def test_adapters_learn_and_the_others_only_pass_gradients_on(rank):
    config = AutoConfig.for_model("qwen2", **SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    wrapped = add_adapters(model, LoraSettings(lora_rank=rank))
    reach_first_layer(model)
    adapters, rows = adapter_sizes(wrapped), torch.randint(0, 256, (ROWS, LENGTH))
    assert adapters == (3 * rank * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96)), 0, 0)
    want = counted(wrapped, input_ids=rows)
    assert estimated(config, [LENGTH] * ROWS, adapters=adapters) == pytest.approx(want, rel=TOLERANCE)
    want = counted_forward(wrapped, input_ids=rows)
    assert estimated(config, [LENGTH] * ROWS, forward_only=True, adapters=adapters) == pytest.approx(want, rel=0.02)


def test_a_token_passes_the_adapters_of_its_own_experts():
    """peft gives gate_up_proj, which is two layers in one, twice the rank."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, **experts})
    wrapped = add_adapters(AutoModelForCausalLM.from_config(config), LoraSettings(lora_rank=4))
    attention, router = 4 * (2 * (64 + 64) + 2 * (64 + 32)), 4 * (64 + 8)
    of_experts = 2 * (8 * (64 + 2 * 24) + 4 * (24 + 64))
    assert adapter_sizes(wrapped) == (3 * (attention + router + of_experts), 0, 0)


def test_a_value_model_has_one_output():
    config = AutoConfig.for_model("qwen2", **SMALL, num_labels=1)
    model = AutoModelForTokenClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    want = counted(model, input_ids=torch.randint(0, 256, (ROWS, LENGTH)))
    assert estimated(config, [LENGTH] * ROWS, num_outputs=1) == pytest.approx(want, rel=TOLERANCE)


def test_lengths_count_by_themselves_and_a_window_counts_what_it_sees():
    """Rows of 3 and 7 tokens have 9 + 49 pairs, with a window of 4 tokens 9 + 28."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = AutoConfig.for_model(
        "gemma3_text", **{**SMALL, "head_dim": 16, "sliding_window": 4, "layer_types": layers}
    )
    weights = 3 * (64 * (2 * 4 + 2 * 2) * 16 + 3 * 64 * 96) + 64 * 256
    pairs = (9 + 49) + 2 * (9 + 28)
    assert estimated(config, [3, 7]) == pytest.approx(6 * weights * 10 + 12 * pairs * 4 * 16)


# ---- vision

ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
TOWERS = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4},
    "qwen2_5_vl": {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
                   "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
                 "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    "glm4v": {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": 64, "image_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", TOWERS)
def test_vision_models_are_counted_as_torch_counts_them(family):
    torch.manual_seed(0)
    grid, images = torch.tensor([[1, 8, 8], [1, 4, 8]]), [64, 32]
    config = AutoConfig.for_model(
        family, text_config={**SMALL, "rope_parameters": ROPE, "head_dim": 16}, vision_config=TOWERS[family], **TOKENS
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor([[252, *[250] * 16, 253, 252, *[250] * 8, 253, 7, 8, 9]])
    pixels = torch.randn(96, 3 * 2 * 4 * 4)
    kinds = {"mm_token_type_ids": (ids == 250).long()}
    want = counted(model, input_ids=ids, pixel_values=pixels, image_grid_thw=grid, **kinds)
    assert estimated(config, [ids.shape[1]], images) == pytest.approx(want, rel=TOLERANCE)
    text_only = counted(model, input_ids=ids[:, -3:].contiguous())
    assert estimated(config, [3]) == pytest.approx(text_only, rel=TOLERANCE)
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    given, rows = {"pixel_values": pixels, "image_grid_thw": grid, **kinds}, [ids.shape[1]]
    for frozen in (True, False):
        want = counted_forward(model, input_ids=ids, **given)
        found = estimated(config, rows, images, forward_only=True, frozen_vision=frozen)
        assert found == pytest.approx(want, rel=TOLERANCE)
    want = counted(model, input_ids=ids, **given)
    assert estimated(config, rows, images, frozen_vision=True) == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.parametrize("tower", [True, False])
def test_adapters_beside_images(tower):
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**SMALL, "rope_parameters": ROPE, "head_dim": 16},
        vision_config=TOWERS["qwen2_5_vl"],
        **TOKENS,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    wrapped = add_adapters(model, LoraSettings(lora_rank=4), freeze_vision_tower=not tower)
    reach_first_layer(model)
    ids, pixels, grid = torch.tensor([[252, *[250] * 16, 253, 7, 8]]), torch.randn(64, 96), torch.tensor([[1, 8, 8]])
    adapters = adapter_sizes(wrapped)
    assert bool(adapters.tower) == bool(adapters.mergers) == tower
    kinds = {"mm_token_type_ids": (ids == 250).long()}
    want = counted(wrapped, input_ids=ids, pixel_values=pixels, image_grid_thw=grid, **kinds)
    found = estimated(config, [ids.shape[1]], [64], adapters=adapters)
    assert found == pytest.approx(want, rel=TOLERANCE)


def test_unknown_families_count_nothing(caplog):
    class Unknown:
        model_type = "mystery"

    assert FlopsCounter(Unknown()).estimate_flops([5], 1.0)[0] == 0
    assert "'mystery'" in caplog.text
    assert FlopsCounter(AutoConfig.for_model("qwen2", **SMALL)).estimate_flops([5], 0.0)[0] == 0


@pytest.mark.parametrize("name, tflops", [("cpu", 0.448), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
                                          ("NVIDIA L40S", 362.05),
                                          ("NVIDIA L40", 181.05), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250),
                                          ("NVIDIA A100-SXM4-80GB", 312), ("Unheard of", float("inf"))])  # fmt: skip
def test_promised_flops(name, tflops, monkeypatch):
    assert get_device_flops(name) == tflops
    monkeypatch.setattr(flops_counter, "get_device_name", lambda: "cpu")
    assert get_device_flops() == 0.448
