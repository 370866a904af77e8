"""Vision-language models on rows of text, images and videos: what an engine and plain transformers make of them."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Glm4vConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.workers.engine import cases
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.workers.engine import BaseEngine

ROWS, RESPONSE, VOCAB = 8, 7, 97
IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = 90, 91, 92, 93, 94, 95
PATCH, MERGE = 4, 2
ATOL = 1e-5

_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "num_heads": 2, "depth": 3}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def vision_config(family: str, tied: bool = False, layers: int = 2) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    common = _TOKENS | {"tie_word_embeddings": tied}
    text = _TEXT | {"rope_parameters": rope, "num_hidden_layers": layers}
    if family == "qwen2_vl":
        tower = _VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=tower, **common)
    tower = _VISION | {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
        text |= {"head_dim": 16}
        if family == "qwen3_vl":
            return Qwen3VLConfig(text_config=text, vision_config=tower, **common)
        return Qwen3VLMoeConfig(text_config=text | _EXPERTS, vision_config=tower, **common)
    if family == "glm4v":
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        tokens = {"image_start_token_id": START, "image_end_token_id": END}
        tokens |= {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
        return Glm4vConfig(text_config=text, vision_config=tower | {"image_size": 16}, **common, **tokens)
    tower |= {"fullatt_block_indexes": [1], "window_size": 16}
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, **common)


def write_model(folder: Path, family: str, tied: bool = False, layers: int = 2) -> None:
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(vision_config(family, tied, layers))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.08)
    model.save_pretrained(folder)


# Rows: grids of images and videos within a prompt, in order; a number is a run of text

_LAYOUTS: list[list[Any]] = [
    [2, ("image", (1, 4, 6)), 3],
    [4],
    [1, ("image", (1, 4, 4)), 2, ("image", (1, 8, 4)), 1],
    [2, ("video", (2, 4, 4)), 2],
    [1, ("video", (2, 4, 6)), 1, ("image", (1, 4, 4)), 2],
    [3, ("image", (1, 6, 6))],
    [6],
    [2],
]
_RESPONSES = [7, 1, 4, 4, 6, 2, 7, 5]
_SHOWN_BY_A_TOOL = {0: (2, (1, 2, 4)), 2: (1, (1, 4, 2))}
"""Row -> the first token of an image of two tokens in its response, and its grid."""


def _row(layout: list[Any], family: str, generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """Return the ids of a prompt and the processor's output for it."""
    ids: list[int] = []
    pixels: dict[str, list[Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[Any]] = {"image": [], "video": []}
    for part in layout:
        if isinstance(part, int):
            ids += torch.randint(3, 80, (part,), generator=generator).tolist()
            continue
        kind, (time, height, width) = part
        tokens = height * width // MERGE**2
        if family == "glm4v" and kind == "video":  # frames of image tokens, each before its time
            frames = [[START, *[IMAGE] * tokens, END, 70 + frame] for frame in range(time)]
            ids += [VIDEO_START, *itertools.chain(*frames), VIDEO_END]
        else:
            runs = [tokens] * time if family.startswith("qwen3_vl") and kind == "video" else [time * tokens]
            for run in runs:  # Qwen3-VL writes each frame of a video on its own, after its time
                ids += [START, *[IMAGE if kind == "image" else VIDEO] * run, END]
        patches = time * height * width
        pixels[kind].append(torch.randn(patches, 3 * 2 * PATCH**2, generator=generator))
        grids[kind].append([time, height, width])
    output = {}
    for kind, values, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        if pixels[kind]:
            output |= {values: torch.cat(pixels[kind]), grid: torch.tensor(grids[kind])}
    return ids, output


def rows(family: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return tensors as of a rollout, without positions, and the processor's output of each row."""
    generator = torch.Generator().manual_seed(3)
    prompts, media = zip(*(_row(layout, family, generator) for layout in _LAYOUTS), strict=True)
    width = max(map(len, prompts)) + 2
    prompt = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    response = torch.randint(3, 80, (ROWS, RESPONSE), generator=generator)
    mask = (torch.arange(RESPONSE) < torch.tensor(_RESPONSES).unsqueeze(1)).long()
    attention = torch.cat([(prompt > 0).long(), mask], dim=1)
    mask = mask.clone()
    mask[4, 3:5] = 0  # text of a tool
    for row, (first, grid) in _SHOWN_BY_A_TOOL.items():
        response[row, first : first + 2] = IMAGE
        mask[row, first : first + 2] = 0
        pixels = torch.randn(8, 3 * 2 * PATCH**2, generator=generator)
        media[row]["pixel_values"] = torch.cat([media[row]["pixel_values"], pixels])
        media[row]["image_grid_thw"] = torch.cat([media[row]["image_grid_thw"], torch.tensor([grid])])
    ids = torch.cat([prompt, response], dim=1) * attention
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "responses": ids[:, width:],
        "response_mask": mask,
        "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
    }
    return tensors, list(media)


def token_kinds(ids: Tensor) -> Tensor:
    """Return 1 for the tokens (B, L) of an image and 2 for those of a video; the frames of GLM-4V have image tokens."""
    inside = (ids == VIDEO_START).cumsum(-1) > (ids == VIDEO_END).cumsum(-1)
    is_image = ids == IMAGE
    return (is_image & ~inside).int() + 2 * ((ids == VIDEO) | (is_image & inside)).int()


def positions(model: Any, tensors: dict[str, Tensor], media: list[dict[str, Tensor]]) -> Tensor:
    """Return (B, 4, L): text positions, then transformers' own for time, height and width."""
    ids, attention = tensors["input_ids"], tensors["attention_mask"]
    kinds = token_kinds(ids)
    joined = join(media)
    grids = {name: joined.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    shown, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, attention_mask=attention, **{k: v for k, v in grids.items() if v is not None}
    )
    text = (attention.cumsum(-1) - 1).clamp(min=0)
    return torch.cat([text.unsqueeze(0), shown]).transpose(0, 1)


def write_with_positions(folder: Path, family: str) -> None:
    """Write a tiny model, and beside it the positions of the rows, which ``batch`` reads."""
    write_model(folder, family)
    torch.save(positions(load(folder), *rows(family)), folder / "positions.pt")


def join(media: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for row in media for name in row}
    return {name: torch.cat([row[name] for row in media if name in row]) for name in names}


def load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def batch(folder: Path, family: str, index: list[int], channels: int = 4, **meta: Any) -> DataProto:
    """Return a shard as it comes from the trainer; the rows of text alone hold an empty dict or None."""
    tensors, media = rows(family)
    tensors["position_ids"] = torch.load(folder / "positions.pt")[:, 4 - channels :]
    shown = np.empty(len(index), dtype=object)
    shown[:] = [media[i] or (None if i % 2 else {}) for i in index]
    data = DataProto.from_dict(
        tensors={name: value[index] for name, value in tensors.items()}, non_tensors={"multi_modal_inputs": shown}
    )
    data.meta_info.update(temperature=cases.TEMPERATURE, calculate_entropy=True, **meta)
    return data


# What plain transformers makes of all rows in one padded pass


def samples_of_prompts(folder: Path, family: str, **meta: Any) -> DataProto:
    """Return samples of six rows with images or without; rows 4 and 8 differ from the others after their prompt."""
    data = batch(folder, family, [3, 4, 3, 5, 5, 4, 0, 0, 5, 6], **meta)
    ids = data.batch["input_ids"]
    generator = torch.Generator().manual_seed(1)
    for row in (4, 8):
        ids[row, -RESPONSE:] = torch.randint(3, 80, (RESPONSE,), generator=generator)
    data.batch["responses"] = ids[:, -RESPONSE:]
    return data


def merged_embeddings(model: Any, ids: Tensor, kinds: Tensor, media: dict[str, Tensor]) -> Tensor:
    """Put the features of images and videos into their tokens.

    GLM-4V's own forward takes no batch with both: it would put the images into the tokens of the videos too.
    """
    inner = model.model
    embeddings = inner.get_input_embeddings()(ids)
    calls = (
        (1, inner.get_image_features, "pixel_values", "image_grid_thw"),
        (2, inner.get_video_features, "pixel_values_videos", "video_grid_thw"),
    )
    for kind, features_of, values, grid in calls:
        if values in media:
            features = torch.cat(features_of(media[values], media[grid]).pooler_output)
            embeddings = embeddings.masked_scatter((kinds == kind).unsqueeze(-1), features)
    return embeddings


def reference(model: Any, family: str, value_model: bool = False) -> dict[str, Any]:
    tensors, media = rows(family)
    mask, advantages = tensors["response_mask"], tensors["advantages"]
    ids, shown = tensors["input_ids"], join(media)
    inputs = {"input_ids": ids, **shown}
    if family == "glm4v":
        inputs = {"inputs_embeds": merged_embeddings(model, ids, token_kinds(ids), shown)}
    logits = model(
        attention_mask=tensors["attention_mask"],
        position_ids=positions(model, tensors, media).transpose(0, 1),
        use_cache=False,
        **inputs,
    ).logits[:, -RESPONSE - 1 : -1]
    if value_model:
        output = {"values": logits[..., 0] * mask}
        loss = (-output["values"].square() * advantages).sum() / mask.sum()
        total, metrics = loss, {"loss": loss, "largest": output["values"].square().max()}
    else:
        log_p = torch.log_softmax(logits / cases.TEMPERATURE, dim=-1)
        chosen = log_p.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1) * mask
        entropy = -(log_p.exp() * log_p).sum(-1) * mask
        loss = -(chosen * advantages).sum() / mask.sum()
        mean_entropy = (entropy.sum(-1) / mask.sum(-1)).mean()
        output = {"log_probs": chosen, "entropy": entropy}
        total = loss - 0.1 * mean_entropy
        metrics = {"loss": loss, "entropy": mean_entropy, "largest": chosen.abs().max()}
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    return {
        "output": {name: value.detach() for name, value in output.items()},
        "metrics": {name: value.item() for name, value in metrics.items()} | {"grad_norm": norm.item()},
        "gradients": gradients,
    }


# Engines

SIZES = {n: {"micro_batch_size_per_gpu": n} for n in (1, 3, 8)}
PADDED = {"use_remove_padding": False}
CHECKPOINTED = {"enable_gradient_checkpointing": True}
SP2 = {"ulysses_sequence_parallel_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 8, "exclude_modules": r".*visual.*"}
ONE, TWO = {"only_world": 1}, {"only_world": 2}
"""Most cases run in one world; cases of text run in both."""

CASES: dict[str, dict[str, Any]] = {
    "packed": {"cut": SIZES[8]},
    "packed, micro 1": ONE | {"cut": SIZES[1]},
    "packed, micro 3, fsdp2": TWO | {"cut": SIZES[3], "engine": {"strategy": "fsdp2"}},
    "packed, dynamic": TWO | {"cut": cases.dynamic(70)},
    "packed, no image on rank 1": TWO | {"cut": SIZES[3], "uneven": True},
    "packed, three rows of positions": ONE | {"cut": SIZES[3], "channels": 3},
    "padded": ONE | {"cut": SIZES[8], "model": PADDED},
    "padded, dynamic, no image on rank 1": TWO | {"cut": cases.dynamic(70), "model": PADDED, "uneven": True},
    "checkpointing, offload": TWO
    | {
        "cut": SIZES[3],
        "model": CHECKPOINTED,
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
    "ulysses": TWO | {"cut": SIZES[3], "engine": SP2, "model": CHECKPOINTED},
    "ulysses, dynamic": TWO | {"cut": cases.dynamic(40), "engine": SP2},
    "ulysses, micro 1, hybrid": TWO | {"cut": SIZES[1], "engine": SP2 | {"fsdp_size": 1}},
    "tied": {"cut": SIZES[3], "folder": "tied"},
    "qwen2_vl": {"cut": SIZES[3], "family": "qwen2_vl"},
    "qwen2_vl, ulysses": TWO | {"cut": SIZES[3], "family": "qwen2_vl", "engine": SP2},
    "qwen3_vl": {"cut": SIZES[3], "family": "qwen3_vl"},
    "qwen3_vl, padded": ONE | {"cut": SIZES[8], "family": "qwen3_vl", "model": PADDED},
    "qwen3_vl, no image on rank 1": TWO | {"cut": SIZES[1], "family": "qwen3_vl", "uneven": True},
    "qwen3_vl, ulysses": TWO | {"cut": SIZES[1], "family": "qwen3_vl", "engine": SP2},
    "glm4v, no image on rank 1": {"cut": SIZES[3], "family": "glm4v", "uneven": True},
    "glm4v, padded, fused": ONE | {"cut": SIZES[8], "family": "glm4v", "model": PADDED | cases.FUSED},
}
SAMPLED: dict[str, dict[str, Any]] = {  # each row two or three times over, which changes no mean
    "packed": ONE | {"cut": SIZES[8], "samples": 3},
    "packed, dynamic": TWO | {"cut": cases.dynamic(140), "samples": 2},
    "padded, checkpointing": ONE | {"cut": SIZES[8], "samples": 2, "model": PADDED | CHECKPOINTED},
    "qwen3_vl, padded": ONE | {"cut": SIZES[8], "family": "qwen3_vl", "samples": 2, "model": PADDED},
    "qwen3_vl, ulysses": TWO | {"cut": SIZES[8], "family": "qwen3_vl", "samples": 2, "engine": SP2},
    "glm4v, ulysses, fused": TWO
    | {"cut": SIZES[8], "family": "glm4v", "samples": 2, "engine": SP2, "model": cases.FUSED | CHECKPOINTED},
}
CASES |= {f"samples of prompts: {name}": case for name, case in SAMPLED.items()}
OTHERS: dict[str, dict[str, Any]] = {
    "frozen": TWO | {"cut": SIZES[3], "frozen": True, "uneven": True},
    "frozen, ulysses": TWO | {"cut": SIZES[3], "frozen": True, "engine": SP2},
    "lora": TWO | {"cut": SIZES[3], "model": LORA | CHECKPOINTED, "uneven": True},
    "lora, frozen": ONE | {"cut": SIZES[8], "model": LORA | {"exclude_modules": None}, "frozen": True},
    "lora, all": ONE | {"cut": SIZES[8], "model": LORA | {"exclude_modules": None}},
    "value": TWO | {"cut": SIZES[3], "kind": "value_model", "uneven": True},
    "value, qwen3_vl": ONE | {"cut": SIZES[1], "kind": "value_model", "family": "qwen3_vl", "model": PADDED},
    "value, ulysses": TWO | {"cut": SIZES[3], "kind": "value_model", "engine": SP2},
    "value, glm4v": ONE | {"cut": SIZES[3], "kind": "value_model", "family": "glm4v"},
}


def folder_of(case: dict[str, Any]) -> str:
    return case.get("folder") or case.get("family", "qwen2_5_vl")


def run_case(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Infer, differentiate, take one step, and export the weights before and after."""
    folder, family = root / folder_of(case), case.get("family", "qwen2_5_vl")
    kind = case.get("kind", "language_model")
    frozen = case.get("frozen", False)
    engine = cases.make(folder, case.get("model"), case.get("engine"), kind, freeze_vision_tower=frozen)
    engine.initialize()
    index = cases.rows_of(engine, case.get("uneven", False))
    index = [row for row in index for _ in range(case.get("samples", 1))]
    data = batch(folder, family, index, case.get("channels", 4), **case["cut"])
    result: dict[str, Any] = {"rows": index, "before": cases.export(engine)}
    if "model" in case and "lora_rank" in case["model"]:
        result["adapter"] = cases.export(engine, adapter_only=True)
    with engine.eval_mode():
        result["output"] = engine.infer_batch(data)
    with engine.train_mode():
        engine.forward_backward_batch(data, cases.loss_fn)
        result["gradients"] = gradients(engine)
        result["metrics"] = engine.train_batch(data, cases.loss_fn)
    result["weights"] = cases.export(engine)
    return result


def gradients(engine: BaseEngine) -> dict[str, Tensor]:
    named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
    return {name: full_tensor(grad).clone() for name, grad in named.items()}


def run_world(rank: int, world_size: int, root: Path, store: str) -> None:
    """Run all cases on one rank and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    chosen = {n: c for n, c in (CASES | OTHERS).items() if c.get("only_world", world_size) == world_size}
    results = {name: run_case(root, case) for name, case in chosen.items()}
    torch.save(results, root / f"world_{world_size}_rank_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()
