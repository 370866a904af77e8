"""What each of two ranks does: save in one layout and go on in another, save beside training, and fail in a save."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.workers.engine import cases, megatron_cases
from tests.workers.engine.megatron_cases import EP, PP, TP, VPP
from verl.utils.checkpoint import verify_checkpoint
from verl.workers.config import CheckpointConfig

DP: dict[str, Any] = {}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2": ("plain", TP),
    "pp 2 x 2": ("plain", VPP),
    "dp 2": ("plain", DP),
    "ep 2": ("qwen3_moe", EP),
    "experts, dp 2": ("qwen3_moe", DP),
    "tied, tp 2": ("tied", TP),
    "tied, pp 2": ("tied", PP),
    "critic, pp 2": ("critic", PP),
    "latent attention, tp 2": ("deepseek", TP),
}
"""Layouts that save: the model and the sizes."""

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2 in pp 2": ("tp 2", PP),
    "tp 2 in dp 2": ("tp 2", DP),
    "pp 2 x 2 in tp 2": ("pp 2 x 2", TP),
    "dp 2 in tp 2": ("dp 2", TP),
    "ep 2 in dp 2": ("ep 2", DP),
    "ep 2 in pp 2": ("ep 2", PP),
    "experts, dp 2 in ep 2": ("experts, dp 2", EP),
    "tied, tp 2 in pp 2": ("tied, tp 2", PP),
    "tied, pp 2 in tp 2": ("tied, pp 2", TP),
    "critic, pp 2 in tp 2": ("critic, pp 2", TP),
    "latent attention, tp 2 in pp 2": ("latent attention, tp 2", PP),
}
"""Layouts that go on from one of them."""

STEPS = 3
SMOOTH = {name: megatron_cases.SMOOTH[name] for name in ("lr", "weight_decay", "betas")} | {
    "override_optimizer_config": {"adam_eps": megatron_cases.SMOOTH["eps"]},
    "lr_decay_style": "linear",
    "total_training_steps": 8,
}
"""AdamW of which a step is a smooth function of the gradient: rounding does not grow where gradients are near zero."""


def build(root: Path, model: str, layout: dict[str, Any], asynchronous: bool = False) -> Any:
    folder, kind = ("plain", "value_model") if model == "critic" else (model, "language_model")
    engine: Any = megatron_cases.build(root / folder, layout, kind, optimizer=SMOOTH)
    engine.checkpoint_config = CheckpointConfig(async_save=asynchronous)
    return engine


def step(engine: Any) -> dict[str, float]:
    rows = cases.rows_of(engine, False)
    with engine.train_mode():
        metrics: dict[str, float] = engine.train_batch(cases.batch(rows, **cases.MICRO[4]), cases.loss_fn)
    return metrics | {"lr": engine.lr_scheduler_step()}


def checkpoint_of(root: Path, name: str, number: int = 1) -> Path:
    return root / name / f"global_step_{number}"


def save(root: Path, name: str) -> list[dict[str, float]]:
    """Take a step, save, and take some more; returns their metrics."""
    engine = build(root, *SAVED[name])
    step(engine)
    engine.save_checkpoint(str(checkpoint_of(root, name)), global_step=1)
    return [step(engine) for _ in range(STEPS)]


def resume(root: Path, name: str) -> list[dict[str, float]]:
    """Go on from a checkpoint; returns the metrics of the next steps."""
    source, layout = RESUMED[name]
    engine = build(root, SAVED[source][0], layout)
    engine.load_checkpoint(str(checkpoint_of(root, source)))
    return [step(engine) for _ in range(STEPS)]


@contextmanager
def writing(before: Any) -> Iterator[None]:
    """Have ``before`` run on the thread that writes tensors, before it does."""
    from verl.utils.megatron.dist_checkpointing import FileSystemWriter

    original = FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        before()
        return original(self, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", write_data):
        yield


def _no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def beside_training(root: Path, rank: int) -> dict[str, Any]:
    """Hold the writer of rank 1 back while training goes on."""
    found: dict[str, Any] = {}
    engine = build(root, "plain", TP, asynchronous=True)
    folders = [checkpoint_of(root, "async", number) for number in (1, 2)]
    step(engine)
    engine.save_checkpoint(str(folders[0]), global_step=1)
    assert engine.finish_checkpoint()
    expected = cases.export(engine)
    gate = threading.Event()
    with writing(gate.wait if rank == 1 else lambda: None):
        engine.save_checkpoint(str(folders[1]), global_step=2, max_ckpt_to_keep=1)
        found["next"] = step(engine)
        found["finished while rank 1 writes"] = engine.finish_checkpoint(wait=False)
        found["problems while rank 1 writes"] = verify_checkpoint(folders[1])
        found["kept while rank 1 writes"] = [folder.is_dir() for folder in folders]
        dist.barrier()
        gate.set()
        found["finished"] = engine.finish_checkpoint()
    found["kept"] = [folder.is_dir() for folder in folders]
    found["problems"] = verify_checkpoint(folders[1])
    restored = build(root, "plain", TP)
    restored.load_checkpoint(str(folders[1]))
    weights = cases.export(restored)
    found["weights are those of the save"] = all(torch.equal(weights[name], expected[name]) for name in expected)
    found["restored"] = step(restored)
    return found


def failing(root: Path, rank: int, asynchronous: bool) -> str:
    """Let the disk of rank 1 be full; returns what this rank raises."""
    engine = build(root, "plain", TP, asynchronous)
    try:
        with writing(_no_room if rank == 1 else lambda: None):
            engine.save_checkpoint(str(checkpoint_of(root, f"full, {asynchronous}")), global_step=1)
            engine.finish_checkpoint()
    except ValueError as error:
        return str(error)
    return ""


def damaged(root: Path, rank: int) -> str:
    """Load a checkpoint in which a file of rank 1 has changed; returns what this rank raises."""
    folder = checkpoint_of(root, "tp 2")
    file = folder / "dist_ckpt" / "__1_0.distcp"
    content = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(content[:100] + bytes([content[100] ^ 255]) + content[101:])
    dist.barrier()
    engine = build(root, "plain", PP)
    try:
        engine.load_checkpoint(str(folder))
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
        if rank == 0:
            file.write_bytes(content)
        dist.barrier()
    return ""


def run_rank(rank: int, world_size: int, root: Path) -> None:
    """Run everything, and write down what was found."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    parts: dict[str, Any] = {name: lambda name=name: save(root, name) for name in SAVED}
    parts |= {name: lambda name=name: resume(root, name) for name in RESUMED}
    parts |= {"damaged": lambda: damaged(root, rank), "async": lambda: beside_training(root, rank)}
    parts |= {f"full, {each}": lambda each=each: failing(root, rank, each) for each in (False, True)}
    for name, part in parts.items():
        found[name] = part()
        parallel_state.destroy_model_parallel()
    torch.save(found, root / f"rank_{rank}.pt")
