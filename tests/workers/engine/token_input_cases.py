"""Tiny vision-language models of families without an entry, their processors, and what transformers makes of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from examples.tiny_model import SPECIAL_TOKENS, byte_tokenizer
from verl.protocol import DataProto
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.vision_utils import Media, MediaEncoder, model_inputs
from verl.utils.py_functional import object_array

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SPECIAL = {
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "paligemma": ["<image>"],
    "qwen3_5": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "glm46v": [
        "<|begin_of_image|>",
        "<|image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|video|>",
        "<|end_of_video|>",
    ],
    "llava_next": ["<image>"],
}
SHOWN = {
    "gemma3": "<start_of_image>",
    "paligemma": "<image>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm46v": "<|begin_of_image|><|image|><|end_of_image|>",
    "llava_next": "<image>",
}
SIZES = {"llava_next": [(56, 28), (28, 84), (28, 28)]}
PROMPT, RESPONSE = 64, 7


def tokenizer_of(family: str) -> Any:
    """Return a tokenizer with the tokens of a family under the names that its processor asks for."""
    special = SPECIAL[family]
    tokenizer = byte_tokenizer("{{ messages[0].content }}", [*SPECIAL_TOKENS, *special])
    named: dict[str, str] = {}
    if family == "gemma3":
        named = dict(zip(("boi_token", "image_token", "eoi_token"), special, strict=True))
    elif family == "paligemma":
        named = {"image_token": special[0]}
    tokenizer.bos_token = "<|system|>"
    tokenizer.init_kwargs.update(named)
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def processor_of(family: str, tokenizer: Any) -> Any:
    """Return the family's processor for images of 28 x 28 or a little more."""
    square = {"height": 28, "width": 28}
    if family == "gemma3":
        return transformers.Gemma3Processor(
            transformers.Gemma3ImageProcessor(size=square), tokenizer, image_seq_length=4
        )
    if family == "paligemma":
        images = transformers.SiglipImageProcessor(size=square)
        images.image_seq_length = 4
        return transformers.PaliGemmaProcessor(images, tokenizer)
    if family == "llava_next":
        images = transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size=square, image_grid_pinpoints=[[28, 56], [56, 28], [28, 84]]
        )
        return transformers.LlavaNextProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="full", num_additional_image_tokens=0
        )
    if family == "qwen3_5":
        images = transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=28 * 28, max_pixels=84 * 84)
        videos = transformers.Qwen3VLVideoProcessor(patch_size=14)
        return transformers.Qwen3VLProcessor(images, tokenizer, videos)
    sizes = {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 84 * 84}
    pictures = transformers.Glm46VImageProcessor(patch_size=14, size=sizes)
    return transformers.Glm46VProcessor(pictures, tokenizer, transformers.Glm46VVideoProcessor(size=sizes))


def config_of(family: str, tokenizer: Any) -> Any:
    """Return the configuration of a tiny model."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[family]]
    text = TEXT | {"vocab_size": len(tokenizer)}
    siglip = TOWER | {"image_size": 28, "patch_size": 14}
    if family == "gemma3":
        text |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        names = dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), ids, strict=True))
        return transformers.Gemma3Config(text_config=text, vision_config=siglip, mm_tokens_per_image=4, **names)
    if family == "paligemma":
        text |= {"model_type": "gemma"}
        tower = siglip | {"projection_dim": 32, "model_type": "siglip_vision_model"}
        return transformers.PaliGemmaConfig(
            vision_config=tower, text_config=text, image_token_index=ids[0], projection_dim=32, hidden_size=32
        )
    if family == "llava_next":
        tower = siglip | {"model_type": "siglip_vision_model"}
        return transformers.LlavaNextConfig(
            vision_config=tower, text_config=text | {"model_type": "llama"}, image_token_index=ids[0],
            vision_feature_select_strategy="full", vision_feature_layer=-1, image_seq_length=4,
            image_grid_pinpoints=[[28, 56], [56, 28], [28, 84]],
        )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    tower = {
        "depth": 1,
        "num_heads": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "patch_size": 14,
    }
    if family == "qwen3_5":
        text |= {"layer_types": ["full_attention"] * 2, "rope_parameters": rope | {"mrope_interleaved": True}}
        names = dict(
            zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids, strict=True)
        )
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
        return transformers.Qwen3_5Config(text_config=text, vision_config=tower, **names)
    text |= {"rope_parameters": rope, "model_type": "glm4v_text"}
    names = (
        "image_start_token_id",
        "image_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_token_id",
        "video_end_token_id",
    )
    tower |= {"image_size": 56, "model_type": "glm4v_vision"}
    return transformers.Glm46VConfig(text_config=text, vision_config=tower, **dict(zip(names, ids, strict=True)))


def write(folder: Path, family: str) -> Any:
    """Write a model with large weights; returns the processor."""
    tokenizer = tokenizer_of(family)
    model = AutoModelForImageTextToText.from_config(config_of(family, tokenizer), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            scale = min(1.0, 2.0 / parameter[0].numel() ** 0.5)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.get_input_embeddings().weight.data[0] = 0.0
    model.save_pretrained(folder)
    return processor_of(family, tokenizer)


def prompts(family: str, processor: Any) -> list[dict[str, Any]]:
    """Return the processor's output of three prompts, of which the last has no image if the family allows that."""
    encoder = MediaEncoder(processor, DataConfig())
    shown = SHOWN[family]
    sizes = SIZES.get(family, [(28, 28), (56, 28), (28, 28)])
    pixels = [np.random.default_rng(at).integers(0, 255, (*size, 3), dtype=np.uint8) for at, size in enumerate(sizes)]
    images = [Image.fromarray(each) for each in pixels]
    found = [encoder.encode(f"see {shown} now", Media([images[0]]))]
    if family == "paligemma":
        return [*found, encoder.encode(f"{shown}and this", Media([images[1]]))]
    found.append(encoder.encode(f"{shown} or {shown} ?", Media(images[1:])))
    ids = torch.tensor([processor.tokenizer("no image", add_special_tokens=False)["input_ids"]])
    return [*found, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def responses(count: int) -> Tensor:
    return torch.randint(5, 60, (count, RESPONSE), generator=torch.Generator().manual_seed(3))


def batch(found: list[dict[str, Any]]) -> DataProto:
    """Return the rows as data set and rollout make them."""
    ids = torch.zeros(len(found), PROMPT + RESPONSE, dtype=torch.long)
    attention = torch.zeros_like(ids)
    ids[:, PROMPT:], attention[:, PROMPT:] = responses(len(found)), 1
    for at, row in enumerate(found):
        width = row["input_ids"].shape[1]
        ids[at, PROMPT - width : PROMPT], attention[at, PROMPT - width : PROMPT] = row["input_ids"][0], 1
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
        "response_mask": attention[:, PROMPT:],
    }
    media = object_array([model_inputs(row) if "pixel_values" in row else {} for row in found])
    data = DataProto.from_dict(tensors=tensors, non_tensors={"multi_modal_inputs": media})
    data.meta_info.update(temperature=1.0, micro_batch_size_per_gpu=len(found))
    return data


@torch.no_grad()
def wanted(folder: Path, found: list[dict[str, Any]]) -> Tensor:
    """Return the log-probabilities of the responses: the processor's output of each prompt, then token by token."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    first = int(model.config.model_type == "paligemma")  # which counts positions from 1
    rows = []
    for row, response in zip(found, responses(len(found)), strict=True):
        inputs = {name: value for name, value in row.items() if name != "labels"}
        output = model(**inputs, use_cache=True)
        mask, scores = row["attention_mask"], []
        shift = getattr(model.model, "rope_deltas", None) if "pixel_values" in row else None
        for at, token in enumerate(response):
            scores.append(output.logits[0, -1].log_softmax(-1)[token])
            mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
            place = torch.tensor([[row["input_ids"].shape[1] + at + first]])
            output = model(
                input_ids=token.view(1, 1),
                attention_mask=mask,
                position_ids=place if shift is None else (place + shift).expand(3, 1, 1),
                past_key_values=output.past_key_values,
                use_cache=True,
            )
        rows.append(torch.stack(scores))
    return torch.stack(rows)
