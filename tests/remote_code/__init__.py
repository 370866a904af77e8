"""Stand-ins for Kimi-VL and MiniCPM-o, families whose code is remote.

The published code and weights cannot be loaded here. ``write_model`` writes a folder with small random weights and
with code of these tests that has the names, arguments and mathematics of the family.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from examples.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_MULTIPLE, byte_tokenizer

HERE = Path(__file__).parent
_CLASSES = {
    "kimi_vl": {
        "config": "configuration_kimi_vl.KimiVLConfig",
        "model": "modeling_kimi_vl.KimiVLForConditionalGeneration",
        "images": "image_processing_kimi_vl.KimiVLImageProcessor",
        "processor": "processing_kimi_vl.KimiVLProcessor",
    },
    "deepseek_v3": {
        "config": "configuration_kimi_vl.DeepseekV3Config",
        "model": "modeling_kimi_vl.DeepseekV3ForCausalLM",
    },
    "minicpmo": {
        "config": "configuration_minicpm.MiniCPMOConfig",
        "model": "modeling_minicpmo.MiniCPMO",
        "images": "image_processing_minicpmv.MiniCPMVImageProcessor",
        "processor": "processing_minicpmo.MiniCPMOProcessor",
    },
}
_MARKS = {
    "deepseek_v3": [],
    "kimi_vl": ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"],
    "minicpmo": ["<unk>", "<image>", "</image>", "<slice>", "</slice>"],
}
_KIMI_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
MOONVIT: dict[str, Any] = {
    "model_type": "moonvit",
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "merge_kernel_size": [2, 2],
}


def write_model(folder: Path, family: str, **text: Any) -> Path:
    """Write weights, code, tokenizer and processor of a family; ``text`` are fields of its language model.

    ``deepseek_v3`` is the language model of Kimi-VL alone, as in Moonlight: transformers has this type too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in (HERE / ("minicpmo" if family == "minicpmo" else "kimi_vl")).glob("*.py"):
        shutil.copy(file, folder)
    tokenizer = byte_tokenizer(
        _KIMI_TEMPLATE if family == "kimi_vl" else CHAT_TEMPLATE, [*SPECIAL_TOKENS, *_MARKS[family]]
    )
    tokenizer.save_pretrained(folder)
    classes = _CLASSES[family]
    if "processor" in classes:
        maps = {"AutoImageProcessor": classes["images"], "AutoProcessor": classes["processor"]}
        (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": maps, "patch_size": 14}))
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    fields = SIZES | {"vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE} | tokens | text
    config: dict[str, Any] = {"model_type": family, "tie_word_embeddings": False, "dtype": "float32"}
    config |= {"architectures": [classes["model"].split(".")[1]]}
    config["auto_map"] = {"AutoConfig": classes["config"], "AutoModel": classes["model"]}
    config["auto_map"]["AutoModelForCausalLM"] = classes["model"]
    if family == "kimi_vl":
        config |= {
            "vision_config": MOONVIT,
            "text_config": {"model_type": "deepseek_v3"} | DEEPSEEK | fields,
        }
        config |= tokens | {"media_placeholder_token_id": tokenizer.convert_tokens_to_ids("<|media_pad|>")}
    elif family == "deepseek_v3":
        config |= DEEPSEEK | fields
    else:
        config |= {"vision_config": {"model_type": "siglip_vision_model"}, "num_key_value_heads": 2} | fields
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    for name, parameter in model.named_parameters():
        if "norm" not in name and ".ln_" not in name:
            parameter.data.normal_(0.0, 0.08)
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    """Return the model by its remote code, with nothing of verl but the router that verl trains."""
    reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoConfig"]
    # AutoConfig prefers classes that vLLM registers, which the code does not read.
    config = get_class_from_dynamic_module(reference, folder).from_pretrained(folder)
    config.get_text_config().topk_method = "greedy"
    options: dict[str, Any] = {"trust_remote_code": True, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
