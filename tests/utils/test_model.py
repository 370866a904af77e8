"""Established helpers around models: names of weights and modules, auto classes, and value heads."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen2VLConfig

from tests.workers.engine.cases import tiny_config, write_model
from verl.utils import fsdp_utils
from verl.utils import model as M


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    write_model(root)
    return str(root)


def test_actor_and_critic_of_a_configuration(folder):
    actor = M.create_huggingface_actor(folder, {"num_hidden_layers": 1}, {"dtype": torch.bfloat16})
    assert isinstance(actor, Qwen2ForCausalLM) and actor.dtype == torch.bfloat16 and len(actor.model.layers) == 1
    critic = M.create_huggingface_critic(folder)
    assert critic(torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 3, 1)
    loaded = M.load_valuehead_model(folder, torch.float32, tiny_config())
    plain = Qwen2ForCausalLM.from_pretrained(folder)
    assert loaded.num_labels == 1
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, plain.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="no token classification model for model_type='clip'"):
        M.get_value_model_class(SimpleNamespace(model_type="clip"))


def test_changes_reach_the_language_model_and_merge():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = Qwen2VLConfig(text_config={"rope_parameters": rope, "hidden_size": 64})
    for config in (vision, LlamaConfig()):
        M.update_model_config(config, {"rope_theta": 5.0, "num_hidden_layers": 1})
        M.update_model_config(config, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
        text = config.get_text_config()
        assert text.num_hidden_layers == 1
        assert (text.rope_parameters["rope_theta"], text.rope_parameters["factor"]) == (5.0, 2.0)
    M.update_model_config(vision, {"vision_config": {"depth": 2}, "image_token_id": 7})
    assert (vision.vision_config.depth, vision.image_token_id) == (2, 7)


def test_path_of_a_model(folder):
    node = OmegaConf.create({"model": {"path": folder}})
    assert M.get_hf_model_path(node) == folder


def test_vision_tower():
    tower = torch.nn.Linear(1, 1)
    assert M.get_vl_model_vision_tower(SimpleNamespace(model=SimpleNamespace(visual=tower))) is tower
    assert M.get_vl_model_vision_tower(SimpleNamespace(visual=tower)) is tower
    assert M.get_vl_model_vision_tower(SimpleNamespace(model=SimpleNamespace())) is None


KEYS = ["model.layers.0.self_attn.q_proj", "q_proj", "model.layers.1.mlp.up_proj", "lm_head", "my_q_proj"]


@pytest.mark.parametrize("target", [["q_proj", "lm_head"], ["model.layers.1.mlp.up_proj"], r".*\.(q|up)_proj", []])
@pytest.mark.parametrize("exclude", [None, ["lm_head"], r".*layers\.0\..*"])
def test_adapted_modules_are_those_that_peft_adapts(target, exclude):
    config = LoraConfig(target_modules=target, exclude_modules=exclude)
    for key in KEYS:
        adapted = M.check_target_modules(config, key) and not M.check_exclude_modules(config, key)
        assert adapted == bool(target and check_target_module_exists(config, key)), key
        name = fsdp_utils.replace_lora_wrapper(f"{key}.weight", config)
        assert name == (f"{key}.base_layer.weight" if adapted else f"{key}.weight")
    assert fsdp_utils.replace_lora_wrapper("q_proj.scale", config) == "q_proj.scale"


def test_weights_get_the_names_of_the_files(tmp_path):
    """transformers holds experts stacked and writes them one by one; a dense model is written as it is held."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11}
    moe = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            num_hidden_layers=1, num_experts=3, moe_intermediate_size=8, shared_expert_intermediate_size=8,
            decoder_sparse_step=1, **small,
        )
    )  # fmt: skip
    moe.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) != set(moe.state_dict())
    converted = M.convert_weight_keys(dict(moe.state_dict()), moe)
    assert set(converted) == set(written)
    assert all(torch.equal(converted[name], tensor) for name, tensor in written.items())
    dense = M.create_huggingface_actor  # the same dictionary comes back where nothing is converted
    LlamaConfig(num_hidden_layers=1, intermediate_size=8, **small).save_pretrained(tmp_path)
    llama = dense(str(tmp_path))
    state = dict(llama.state_dict())
    assert M.convert_weight_keys(state, llama) is state


def test_buffers_and_layers_that_files_hold():
    part = torch.nn.Module()
    part.register_buffer("bias", torch.ones(2))
    part.register_buffer("frequencies", torch.ones(2), persistent=False)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), part)
    assert [name for name, _ in M.stored_buffers(module)] == ["1.bias"]
    names = {f"model.layers.{layer}.mlp.weight" for layer in (1, 2, 3, 12, 21)} | {"lm_head.weight"}
    config = SimpleNamespace(num_hidden_layers=2, num_nextn_predict_layers=1)
    assert M.prediction_layer_names(names, config) == {"model.layers.2.mlp.weight"}
    assert M.prediction_layer_names(names, SimpleNamespace(num_hidden_layers=2)) == set()
