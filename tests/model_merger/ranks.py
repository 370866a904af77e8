"""Run on each of two ranks: train an engine for a step, save it, and save the engine's own export."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.engine import cases
from verl.workers.config import CheckpointConfig

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"folder": "plain", "engine": {"strategy": "fsdp2"}},
    "tied": {"folder": "tied", "engine": {"fsdp_size": 1}},  # mesh (ddp, fsdp)
    "lora": {"folder": "plain", "model": {"lora_rank": 4, "lora_alpha": 8}},
    "lora experts": {"folder": "glm4_moe", "model": {"lora_rank": 4, "lora_alpha": 8}},
    "half": {"folder": "half", "trains": False},
    "value": {"folder": "plain", "kind": "value_model"},
    "value lora": {"folder": "plain", "kind": "value_model", "model": {"lora_rank": 4, "lora_alpha": 8}},
}


def save(root: Path, name: str, rank: int) -> None:
    """Take one optimizer step, save as a run does, and keep the engine's own exports."""
    case = KINDS[name]
    engine: Any = cases.build(
        root / case["folder"], case.get("model"), case.get("engine"), case.get("kind", "language_model")
    )
    engine.checkpoint_config = CheckpointConfig()
    rows = cases.rows_of(engine, uneven=False)
    if case.get("trains", True):
        with engine.train_mode():
            engine.train_batch(cases.batch(rows, **cases.MICRO[4]), cases.loss_fn)
    engine.save_checkpoint(str(root / name / "global_step_1" / "actor"), global_step=1)
    exported = {"weights": cases.export(engine)}
    if "model" in case:
        exported["adapter"] = cases.export(engine, adapter_only=True)
    if rank == 0:
        torch.save(exported, root / f"{name}.pt")


def run_rank(rank: int, world_size: int, root: Path) -> None:
    """Save all kinds."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
    for name in KINDS:
        save(root, name, rank)
    dist.destroy_process_group()
