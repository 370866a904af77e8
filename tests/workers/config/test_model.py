"""The Hugging Face node: nothing is loaded before it is read, and what cannot be loaded is named."""

import json
import subprocess
import sys

import pytest

from verl.base_config import ConfigError
from verl.workers.config import HFModelConfig

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    words = {word: index for index, word in enumerate(["<eos>", "<pad>", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


def test_construction_loads_nothing():
    code = (
        "import sys; from verl.workers.config import HFModelConfig; config = HFModelConfig(path='/nowhere');"
        "assert config.tokenizer_path == config.hf_config_path == '/nowhere'; repr(config);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_parts_are_loaded_on_first_use_and_can_be_given(model_folder):
    config = HFModelConfig(path=str(model_folder), custom_chat_template="{{ messages }}")
    assert config.local_path == str(model_folder)
    assert config.tokenizer is config.tokenizer
    assert config.tokenizer.chat_template == "{{ messages }}"
    assert (config.eos_token_id, config.pad_token_id) == (0, 1)
    assert (config.hf_config.eos_token_id, config.hf_config.pad_token_id) == (0, 1)
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert config.processor is None and config.get_processor() is config.tokenizer
    config.tokenizer = "mine"
    assert config.tokenizer == "mine"
    assert HFModelConfig(path=str(model_folder), load_tokenizer=False).tokenizer is None


def test_a_changed_path_takes_along_what_follows_it():
    changed = HFModelConfig(path="a", tokenizer_path="a").changed({"path": "b"})
    assert (changed.hf_config_path, changed.tokenizer_path) == ("b", "a")  # the second was written


def test_overrides_win_and_mappings_merge(model_folder):
    override = {
        "attention_dropout": 0.25,
        "attn_implementation": "eager",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "model_config": {"max_position_embeddings": 512},
        "eos_token_id": 3,
    }
    hf_config = HFModelConfig(path=str(model_folder), override_config=override).hf_config
    assert (hf_config.attention_dropout, hf_config.max_position_embeddings, hf_config.eos_token_id) == (0.25, 512, 3)
    assert hf_config._attn_implementation == "eager"
    rope = hf_config.rope_parameters
    # The base keeps what the override does not name.
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4.0, 10000.0)
    plain = HFModelConfig(path=str(model_folder)).hf_config
    assert plain._attn_implementation_internal is None  # the engine chooses


def test_what_is_no_model_is_named(model_folder, tmp_path):
    def folder(name, files):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        return str(tmp_path / name)

    truncated = json.dumps({"model_type": "qwen2"})[:-5]
    two = json.dumps({"model_type": "qwen2", "architectures": ["A", "B"], **SIZES})
    for path, message in (
        (str(tmp_path / "absent"), "model.path=.*absent: no such folder"),
        ("~/no/such/model", "no such folder"),
        (folder("empty", {}), "has no config.json, it holds nothing"),
        (folder("weights", {"model.safetensors": ""}), "it holds model.safetensors"),
        (folder("cut", {"config.json": truncated}), "config.json is not readable JSON"),
        (folder("list", {"config.json": "[]"}), "not a JSON object"),
        (folder("strange", {"config.json": '{"model_type": "nonesuch"}'}), "no usable config.json"),
        (str(model_folder / "config.json"), "is a file: write the folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            HFModelConfig(path=path, load_tokenizer=False).hf_config  # noqa: B018
    with pytest.raises(ConfigError, match=r"must name one architecture, it names \['A', 'B'\]"):
        HFModelConfig(path=folder("two", {"config.json": two}), load_tokenizer=False).architectures  # noqa: B018
    with pytest.raises(ValueError, match="model.tokenizer_path=.*holds no tokenizer"):
        HFModelConfig(path=folder("mute", {"config.json": json.dumps({"model_type": "qwen2", **SIZES})})).tokenizer  # noqa: B018
