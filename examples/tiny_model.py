"""Create a small model with random weights and a byte-level tokenizer, for machines without GPU and network.

python examples/tiny_model.py --save-dir ~/models/tiny-qwen2
python examples/tiny_model.py --save-dir ~/models/tiny-qwen2.5-vl --kind qwen2_5_vl
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM_MEDIA = {
    "<|vision_start|><|image_pad|><|vision_end|>": "<|begin_of_image|><|image|><|end_of_image|>",
    "<|vision_start|><|video_pad|><|vision_end|>": "<|begin_of_video|><|video|><|end_of_video|>",
}
"""The tokens of an image and of a video: Qwen's mapped to GLM-4V's."""
VOCAB_MULTIPLE = 16
VL_KINDS = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "glm4v": "Glm4v",
}


def byte_tokenizer(
    chat_template: str = CHAT_TEMPLATE, special_tokens: list[str] = SPECIAL_TOKENS
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so that it can encode any text; ``<|end|>`` ends a turn."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*bytes_, *special_tokens])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        additional_special_tokens=special_tokens,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 2) -> Qwen2Config:
    """Return a Qwen2 configuration with attention heads of 32 dimensions."""
    heads = hidden_size // 32
    return Qwen2Config(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_tiny_model(
    save_dir: str, hidden_size: int = 128, num_layers: int = 2, seed: int = 0, words: Sequence[str] = ()
) -> str:
    """Write model and tokenizer to a folder that ``from_pretrained`` loads; return the folder.

    Args: ``words`` are texts that get one token each, such as the fixed parts of a tool call.
    """
    save_dir = os.path.expanduser(save_dir)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in words])
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size, num_layers))
    _save(model, tokenizer, save_dir)
    return save_dir


def make_tiny_vl_model(
    save_dir: str, kind: str = "qwen2_5_vl", hidden_size: int = 128, num_layers: int = 2, seed: int = 0
) -> str:
    """Write a vision-language model and its processor to a folder that ``from_pretrained`` loads; return the folder.

    Args: ``kind`` is one of ``VL_KINDS``.
    """
    save_dir = os.path.expanduser(save_dir)
    tokenizer = vision_tokenizer(kind)
    torch.manual_seed(seed)
    config = tiny_vl_config(kind, tokenizer, hidden_size, num_layers)
    model = getattr(transformers, f"{VL_KINDS[kind]}ForConditionalGeneration")(config)
    vl_processor(kind, tokenizer).save_pretrained(save_dir)
    _save(model, tokenizer, save_dir)
    return save_dir


def vision_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model family, with its special tokens for images and videos."""
    template = VISION_CHAT_TEMPLATE
    tokens = VISION_TOKENS
    if kind == "glm4v":
        for qwen, glm in GLM_MEDIA.items():
            template = template.replace(qwen, glm)
        tokens = re.findall(r"<\|\w+\|>", "".join(GLM_MEDIA.values()))
    return byte_tokenizer(template, SPECIAL_TOKENS + tokens)


def tiny_vl_config(
    kind: str, tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 2
) -> PretrainedConfig:
    """Return the configuration of one of ``VL_KINDS``, with heads of 32 dimensions and a vision tower of two blocks."""
    text = tiny_config(tokenizer, hidden_size, num_layers).to_dict()
    for name in ("model_type", "architectures", "layer_types"):
        text.pop(name, None)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 64, "hidden_size": hidden_size, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": hidden_size}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    if kind.startswith("qwen3_vl"):
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * hidden_size // 4}
        text["norm_topk_prob"] = True  # vLLM requires this key
    if kind == "glm4v":
        text |= {"head_dim": 32, "attention_bias": True}
        rope |= {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
        vision["image_size"] = 56
        names = {"image": "image", "image_start": "begin_of_image", "image_end": "end_of_image"}
        names |= {"video": "video", "video_start": "begin_of_video", "video_end": "end_of_video"}
    else:
        names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return getattr(transformers, f"{VL_KINDS[kind]}Config")(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()},
    )


def vl_processor(kind: str, tokenizer: PreTrainedTokenizerFast, max_pixels: int = 128 * 128) -> ProcessorMixin:
    """Return a processor that shrinks images, so that an image becomes only a few tokens."""
    patch_size, family = (16, "Qwen3VL") if kind.startswith("qwen3_vl") else (14, "Qwen2VL")
    least = (2 * patch_size) ** 2
    if kind == "glm4v":  # its limits count the pixels of both frames that a patch covers
        size = {"shortest_edge": 2 * least, "longest_edge": 2 * max_pixels}
        pictures = transformers.Glm4vImageProcessor(patch_size=patch_size, size=size)
        clips = transformers.Glm4vVideoProcessor(size=size | {"longest_edge": 8 * max_pixels})
        return transformers.Glm4vProcessor(pictures, tokenizer, clips, chat_template=tokenizer.chat_template)
    images = transformers.Qwen2VLImageProcessor(patch_size=patch_size, min_pixels=least, max_pixels=max_pixels)
    videos = getattr(transformers, f"{family}VideoProcessor")(
        patch_size=patch_size, size={"shortest_edge": least, "longest_edge": 8 * max_pixels}
    )
    cls = getattr(transformers, f"{VL_KINDS[kind].removesuffix('Moe')}Processor")
    return cls(images, tokenizer, videos, chat_template=tokenizer.chat_template)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, save_dir: str) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(save_dir)
    tokenizer.save_pretrained(save_dir)
    # For some model types AutoTokenizer ignores the saved class; check that decoding still restores the text.
    probe = "1 + 1 =\n\té"
    reloaded = AutoTokenizer.from_pretrained(save_dir, trust_remote_code=False)
    assert reloaded.decode(reloaded(probe)["input_ids"]) == probe, "the saved tokenizer loses text"


def main() -> None:
    """Create the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument("--kind", choices=["qwen2", *VL_KINDS], default="qwen2", help="architecture (default: qwen2)")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--num-layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    parser.add_argument("--words", nargs="*", default=[], help="texts that get one token each (qwen2)")
    args = parser.parse_args()
    sizes = (args.hidden_size, args.num_layers, args.seed)
    if args.kind == "qwen2":
        path = make_tiny_model(args.save_dir, *sizes, args.words)
    else:
        path = make_tiny_vl_model(args.save_dir, args.kind, *sizes)
    print(f"wrote a {args.kind} model with hidden size {args.hidden_size} and {args.num_layers} layers to {path}")


if __name__ == "__main__":
    main()
