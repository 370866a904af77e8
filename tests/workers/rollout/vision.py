"""Tiny vision-language models, prompts with images for them, and engines around both, for the tests of rollouts."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from examples.tiny_model import make_tiny_vl_model
from tests.workers.engine.vision_cases import merged_embeddings
from tests.workers.rollout import tiny
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.vision.multi_modal import concat_multi_modal_inputs
from verl.utils.vision.positions import config_rope
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.build import checkpoint_names
from verl.workers.rollout import build_rollout
from verl.workers.rollout.base import BaseRollout

PROMPT_LENGTH = 160


def make_model(folder: Path, kind: str) -> tuple[Any, HFModelConfig]:
    """Return a model in memory, its weights moved from what the folder holds, and the folder's configuration."""
    from transformers import AutoModelForImageTextToText

    path = make_tiny_vl_model(str(folder), kind)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    tiny.disturb(model, 0.05, seed=1)
    return model, HFModelConfig(path=path)


def start(name: str, model: Any, model_config: HFModelConfig, **changes: Any) -> BaseRollout:
    settings = {"prompt_length": PROMPT_LENGTH, "max_num_batched_tokens": 512, "max_num_seqs": 8} | changes
    config = tiny.rollout_config(name, **settings)
    return build_rollout(config, model_config, tiny.TrainerStandIn(model))


def png(width: int, height: int, seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue()}


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Text only, one image, two images, and an image with a video that is longer than it is wide."""
    clip = {"video": [png(64, 64, seed + 10 + i) for i in range(8)], "min_pixels": 56 * 56, "max_pixels": 64 * 64}
    contents: list[tuple[str, list[Any], list[Any]]] = [
        ("text only", [], []),
        ("what is <image>?", [png(84, 56, seed)], []),
        ("<image> or <image> here", [png(84, 56, seed + 1), png(112, 112, seed + 2)], []),
        ("<image> then <video> end", [png(56, 56, seed + 3)], [clip | {"sample_fps": 0.5}]),
    ]
    return [
        {
            "prompt": [{"role": "user", "content": content}],
            "data_source": "x",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "images": images,
            "videos": clips,
        }
        for content, images, clips in contents
    ]


def prompts(model_config: HFModelConfig, folder: Path, repeat: int = 2, seed: int = 0) -> DataProto:
    path = str(folder / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows(seed)), path)
    settings = {"max_prompt_length": PROMPT_LENGTH, "filter_overlong_prompts": False}
    dataset = RLHFDataset(path, model_config.tokenizer, settings, model_config.processor)
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(dataset))]))
    batch = batch.repeat(repeat, interleave=True)
    batch.batch["sampling_seed"] = torch.arange(len(batch)) + 7
    names = ("raw_prompt_ids", "multi_modal_data", "multi_modal_inputs")
    batch.meta_info = {"eos_token_id": model_config.eos_token_id, "pad_token_id": model_config.pad_token_id}
    return batch.select(non_tensor_batch_keys=list(names))


def pairs_of(rollout: BaseRollout, model: Any) -> list[tuple[str, Tensor]]:
    """Return the weights as engines take them: under the names of a checkpoint, and for ``hf`` under its own."""
    held = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return list(held if rollout.config.name == "hf" else checkpoint_names(model, held))


def load_all(rollout: BaseRollout, model: Any, version: int = 1) -> None:
    rollout.begin_update()
    rollout.load(pairs_of(rollout, model))
    rollout.finish_update(version)


def reference_log_probs(model: Any, asked: DataProto, output: DataProto, temperature: float) -> Tensor:
    """Score the responses row by row by transformers' own forward pass, with transformers' own positions."""
    scores = torch.zeros(output.batch["responses"].shape)
    for row in range(len(output)):
        kept = output.batch["attention_mask"][row].bool()
        ids = output.batch["input_ids"][row][kept]
        inputs = concat_multi_modal_inputs([asked.non_tensor_batch["multi_modal_inputs"][row]])
        length = int(output.batch["response_mask"][row].sum())
        scores[row, :length] = log_probs_of_end(model, ids, length, inputs, temperature)
    return scores


@torch.no_grad()
def log_probs_of_end(model: Any, ids: Tensor, length: int, inputs: dict[str, Any], temperature: float) -> Tensor:
    """Score the last tokens of a sequence (L,), which the model has sampled; ``inputs`` are those of its images."""
    rope = config_rope(model.config)
    family = model.config.model_type
    if family == "qwen2_5_vl" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = torch.tensor([4.0])  # two frames at half a frame per second
    images, videos = rope.placeholders(ids)
    kinds = images.int() + 2 * videos.int()
    kinds[-length:] = 0  # what the model wrote is text
    as_text = ids.masked_fill((images | videos) & (kinds == 0), 0)  # transformers looks at tokens, too
    ids, kinds = ids[None], kinds[None]
    attention = torch.ones_like(ids)
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, *unused: F.embedding(ids, module.weight))
    if family == "glm4v":
        grids = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        positions, _ = model.model.get_rope_index(ids, kinds, **grids, attention_mask=attention)
        inputs = {"inputs_embeds": merged_embeddings(model, ids, kinds, inputs), "position_ids": positions}
    else:
        inputs |= {"input_ids": as_text[None], "mm_token_type_ids": kinds}
    logits = model(attention_mask=attention, **inputs).logits
    hook.remove()
    chosen = torch.log_softmax(logits[0, -length - 1 : -1].float() / temperature, dim=-1)
    return chosen.gather(-1, ids[0, -length:, None])[:, 0]
