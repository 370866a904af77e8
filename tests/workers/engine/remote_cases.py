"""Families with remote code on rows of text and images: the results of an engine and of the model alone."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests import remote_code
from tests.ranks import note
from tests.workers.engine import cases
from tests.workers.engine.vision_cases import gradients
from verl.base_config import WrongInput
from verl.models.transformers import remote
from verl.models.transformers.packed_sequences import PackedSequences
from verl.protocol import DataProto
from verl.utils import ulysses

FAMILIES = ("kimi_vl", "minicpmo")
ROWS, RESPONSE, SIDE = 8, 7, 14
MARKS = {
    "kimi_vl": ("<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    "minicpmo": ("<image>", "<unk>", "</image>"),
}
_LAYOUTS: list[list[Any]] = [[2, (4, 6), 3], [4], [1, (4, 4), 2, (8, 4), 1], [2, (2, 2), 2], [3, (6, 6)], [6], [2], [5]]
"""Prompts: a number is a run of text, a pair an image of that many patches."""
_RESPONSES = [7, 1, 4, 4, 6, 2, 7, 5]


def _row(
    layout: list[Any], family: str, marks: list[int], generator: torch.Generator
) -> tuple[list[int], dict[str, Any]]:
    """Return the ids of a prompt and the processor's output for it."""
    ids: list[int] = []
    pixels: list[Tensor] = []
    grids: list[tuple[int, int]] = []
    bounds: list[tuple[int, int]] = []
    for part in layout:
        if isinstance(part, int):
            ids += torch.randint(3, 90, (part,), generator=generator).tolist()
            continue
        patches = part[0] * part[1]
        tokens = patches // 4 if family == "kimi_vl" else 4  # merged patches, or the queries of a slice
        bounds.append((len(ids) + 1, len(ids) + 1 + tokens))
        ids += [marks[0], *[marks[1]] * tokens, marks[2]]
        pixels.append(torch.randn(patches, 3, SIDE, SIDE, generator=generator))
        grids.append(part)
    if not pixels:
        return ids, {}
    if family == "kimi_vl":
        return ids, {"pixel_values": torch.cat(pixels), "image_grid_hws": torch.tensor(grids)}
    slices = [part.permute(1, 2, 0, 3).flatten(2) for part in pixels]  # (3, side, patches * side)
    return ids, {"pixel_values": slices, "tgt_sizes": torch.tensor(grids), "image_bound": torch.tensor(bounds)}


def rows(folder: Path, family: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return tensors as of a rollout and the processor's output of each row."""
    generator = torch.Generator().manual_seed(3)
    marks = AutoTokenizer.from_pretrained(folder, trust_remote_code=True).convert_tokens_to_ids(list(MARKS[family]))
    made = [_row(layout, family, marks, generator) for layout in _LAYOUTS]
    width = max(len(ids) for ids, _ in made) + 2
    pads = torch.tensor([width - len(ids) for ids, _ in made])
    prompt = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in made])
    response = torch.randint(3, 90, (ROWS, RESPONSE), generator=generator)
    mask = (torch.arange(RESPONSE) < torch.tensor(_RESPONSES).unsqueeze(1)).long()
    attention = torch.cat([(torch.arange(width) >= pads.unsqueeze(1)).long(), mask], dim=1)
    mask = mask.clone()
    mask[0, 2:4] = 0  # tokens of a tool
    ids = torch.cat([prompt, response], dim=1) * attention
    for pad, (_, media) in zip(pads.tolist(), made, strict=True):
        if "image_bound" in media:
            media["image_bound"] = media["image_bound"] + pad
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, width:],
        "response_mask": mask,
        "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
    }
    return tensors, [media for _, media in made]


def batch(folder: Path, family: str, index: list[int], **meta: Any) -> DataProto:
    """Return a shard as it comes from the trainer; the rows of text alone hold an empty dict or None."""
    tensors, media = rows(folder, family)
    shown = np.empty(len(index), dtype=object)
    shown[:] = [media[i] or (None if i % 2 else {}) for i in index]
    data = DataProto.from_dict(
        tensors={name: value[index] for name, value in tensors.items()}, non_tensors={"multi_modal_inputs": shown}
    )
    data.meta_info.update(temperature=cases.TEMPERATURE, calculate_entropy=True, **meta)
    return data


# What the model alone makes of the rows, one by one and without padding


def direct(model: Any, family: str, tensors: dict[str, Tensor], media: dict[str, Any], row: int) -> Tensor:
    """Return the logits (L, V) of a row by the model's own forward."""
    kept = tensors["attention_mask"][row].bool()
    ids = tensors["input_ids"][row][kept].unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    mask = torch.ones_like(ids)
    if family == "kimi_vl":
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **media).logits[0]
    bounds = media.get("image_bound", torch.zeros(0, 2, dtype=torch.long)) - int(kept.long().argmax())
    data = {
        "input_ids": ids,
        "position_ids": positions,
        "pixel_values": [media.get("pixel_values", [])],
        "tgt_sizes": [media.get("tgt_sizes", [])],
        "image_bound": [bounds],
    }
    return model(data=data, attention_mask=mask, use_cache=False).logits[0]


def reference(folder: Path, family: str) -> dict[str, Any]:
    model = remote_code.load(folder).eval()
    tensors, media = rows(folder, family)
    mask, advantages = tensors["response_mask"], tensors["advantages"]
    chosen, entropy = [], []
    for row in range(ROWS):
        logits = direct(model, family, tensors, media[row], row)
        count = int(tensors["attention_mask"][row, -RESPONSE:].sum())
        log_p = torch.log_softmax(logits[-count - 1 : -1] / cases.TEMPERATURE, dim=-1)
        labels = tensors["responses"][row, :count].unsqueeze(1)
        columns = [log_p.gather(1, labels)[:, 0], -(log_p.exp() * log_p).sum(-1)]
        padded = [torch.cat([column, column.new_zeros(RESPONSE - count)]) for column in columns]
        chosen.append(padded[0])
        entropy.append(padded[1])
    output = {"log_probs": torch.stack(chosen) * mask, "entropy": torch.stack(entropy) * mask}
    loss = -(output["log_probs"] * advantages).sum() / mask.sum()
    mean_entropy = (output["entropy"].sum(-1) / mask.sum(-1)).mean()
    (loss - 0.1 * mean_entropy).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in found.values()]).sum().sqrt()
    metrics = {"loss": loss, "entropy": mean_entropy, "largest": output["log_probs"].abs().max(), "grad_norm": norm}
    return {
        "output": {name: value.detach() for name, value in output.items()},
        "metrics": {name: value.item() for name, value in metrics.items()},
        "gradients": found,
    }


# Engines

SIZES = {n: {"micro_batch_size_per_gpu": n} for n in (1, 3, 8)}
PADDED = {"use_remove_padding": False}
CHECKPOINTED = {"enable_gradient_checkpointing": True}
SP2 = {"ulysses_sequence_parallel_size": 2}
TWO = {"only_world": 2}

LORA = {"lora_rank": 4, "lora_alpha": 8, "exclude_modules": r".*(vision_tower|vpm|resampler|projector).*"}

QUICK: dict[str, dict[str, Any]] = {
    "packed, dynamic, checkpointing": {"cut": cases.dynamic(70), "model": CHECKPOINTED},
    "samples of prompts, padded": {"cut": SIZES[8], "samples": 2, "model": PADDED},
    "packed, no image on rank 1": TWO | {"cut": SIZES[1], "uneven": True},
    "ulysses": TWO | {"cut": SIZES[3], "engine": SP2, "model": CHECKPOINTED},
}
FULL: dict[str, dict[str, Any]] = {
    "packed": {"cut": SIZES[8]},
    "packed, fsdp2": TWO | {"cut": SIZES[3], "engine": {"strategy": "fsdp2"}},
    "padded": {"cut": SIZES[3], "model": PADDED},
    "padded, checkpointing, no image on rank 1": TWO
    | {"cut": SIZES[8], "model": PADDED | CHECKPOINTED, "uneven": True},
    "offload": {"cut": SIZES[3], "engine": {"param_offload": True, "optimizer_offload": True}},
    "ulysses, dynamic, hybrid": TWO | {"cut": cases.dynamic(40), "engine": SP2 | {"fsdp_size": 1}},
    "samples of prompts": {"cut": SIZES[8], "samples": 3},
    "frozen": {"cut": SIZES[3], "frozen": True, "uneven": True},
    "lora": {"cut": SIZES[3], "model": LORA | CHECKPOINTED, "uneven": True},
}


def run_case(folder: Path, family: str, case: dict[str, Any]) -> dict[str, Any]:
    """Infer, differentiate, take one step, and export the weights before and after."""
    model = {"trust_remote_code": True} | case.get("model", {})
    engine = cases.make(folder, model, case.get("engine"), freeze_vision_tower=case.get("frozen", False))
    engine.initialize()
    index = cases.rows_of(engine, case.get("uneven", False))
    if case.get("uneven") and engine.get_data_parallel_size() == 2:  # rows 5 to 7 have no image
        index = [0, 1, 2, 3, 4] if engine.get_data_parallel_rank() == 0 else [5, 6, 7]
    index = [row for row in index for _ in range(case.get("samples", 1))]
    data = batch(folder, family, index, **case["cut"])
    result: dict[str, Any] = {"rows": index, "before": cases.export(engine)}
    with engine.eval_mode():
        result["output"] = engine.infer_batch(data)
    with engine.train_mode():
        engine.forward_backward_batch(data, cases.loss_fn)
        result["gradients"] = gradients(engine)
        result["metrics"] = engine.train_batch(data, cases.loss_fn)
    result["weights"] = cases.export(engine)
    return result


def refusal_without_exchange(folder: Path) -> str:
    """Return why an attention is refused whose ranks see only their slice of a sequence."""
    plain = remote.varlen_attention_forward

    def alone(*args: Any, packed_sequences: PackedSequences, **kwargs: Any) -> Any:
        here = PackedSequences([args[1].shape[2]], args[1].device)
        group = ulysses.set_ulysses_sequence_parallel_group(None)
        try:
            return plain(*args, packed_sequences=here, **kwargs)
        finally:
            ulysses.set_ulysses_sequence_parallel_group(group)

    remote.varlen_attention_forward = alone
    try:
        cases.build(folder, {"trust_remote_code": True}, SP2)
    except WrongInput as error:
        return str(error)
    finally:
        remote.varlen_attention_forward = plain
    return ""


def run_world(rank: int, world_size: int, root: Path, store: str, names: tuple[str, ...]) -> None:
    """Run the named cases on one rank and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results: dict[Any, Any] = {}
    for family in FAMILIES:
        for name in names:
            case = (QUICK | FULL)[name]
            if case.get("only_world", world_size) == world_size:
                note(f"{family}: {name}")
                results[family, name] = run_case(root / family, family, case)
    if world_size > 1:
        results["refusal"] = refusal_without_exchange(root / "kimi_vl")
    torch.save(results, f"{store}_{world_size}_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()
