"""Run on each of two ranks: build a sharded model, save it like a run, and save the engine's own export."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.engine import cases, megatron_cases
from verl.workers.config import CheckpointConfig

ALL = ["model", "optimizer", "extra", "hf_model"]
UNTRAINED: dict[str, dict[str, Any]] = {
    "plain tp 2": {"folder": "plain", "engine": megatron_cases.TP},
    "plain pp 2": {"folder": "plain", "engine": megatron_cases.PP},
    "qwen3 dp 2": {"folder": "qwen3", "engine": {}},
    "tied pp 2 x 2": {"folder": "tied", "engine": megatron_cases.VPP},
    "tied tp 2": {"folder": "tied", "engine": megatron_cases.TP},
    "qwen3 moe ep 2": {"folder": "qwen3_moe", "engine": megatron_cases.EP},
    "qwen2 moe pp 2": {"folder": "qwen2_moe", "engine": megatron_cases.PP},
    "mixtral tp 2": {"folder": "mixtral", "engine": megatron_cases.TP},
}
"""Saved as they were loaded, from weights in bf16; the engine holds them in fp32."""
TRAINED: dict[str, dict[str, Any]] = {
    "trained tp 2": {"folder": "plain", "engine": megatron_cases.TP},
    "value pp 2": {"folder": "plain", "engine": megatron_cases.PP, "kind": "value_model"},
}
CASES = UNTRAINED | TRAINED


def checkpoint_of(root: Path, name: str) -> Path:
    return root / name / "global_step_1" / "actor"


def save(root: Path, name: str) -> dict[str, torch.Tensor]:
    """Build, take a step where the case trains, and save; returns the engine's own export."""
    case = CASES[name]
    engine: Any = megatron_cases.build(root / case["folder"], case["engine"], case.get("kind", "language_model"))
    engine.checkpoint_config = CheckpointConfig(save_contents=ALL if name in TRAINED else ["model"])
    if name in TRAINED:
        rows = cases.rows_of(engine, uneven=False)
        with engine.train_mode():
            engine.train_batch(cases.batch(rows, **cases.MICRO[4]), cases.loss_fn)
    engine.save_checkpoint(str(checkpoint_of(root, name)), global_step=1)
    return cases.export(engine)


def run_rank(rank: int, world_size: int, root: Path) -> None:
    """Save all cases."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    exported = {}
    for name in CASES:
        exported[name] = save(root, name)
        parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(exported, root / "exported.pt")
