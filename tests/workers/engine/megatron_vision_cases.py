"""The cases of the vision contract on Megatron-Core: the rows, losses and references of the FSDP engine."""

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.ranks import note
from tests.workers.engine import cases, megatron_cases
from tests.workers.engine import vision_cases as vision
from tests.workers.engine.megatron_cases import CP, EP, ETP1, OVERLAP, PP, RECOMPUTE, TP, VPP
from verl.workers.config import CheckpointConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

LAYERS = 4
FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
RECOMPUTED = {"override_transformer_config": RECOMPUTE}
OFFLOAD = megatron_cases.OFFLOAD

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"tp 2": TP, "pp 2": PP, "cp 2": CP, "dp 2": OVERLAP | OFFLOAD, "tp 2 ep 2": TP | EP | ETP1},
    4: {
        "tp 2 pp 2": TP | PP,
        "pp 2 x 2 virtual dp 2": VPP,
        "tp 2 cp 2": TP | CP,
        "pp 2 ep 2": PP | EP,
    },
}
DYNAMIC = {"cut": cases.dynamic(70)}
CASES: dict[str, dict[str, Any]] = {
    "qwen2.5": DYNAMIC | {"uneven": True},
    "qwen2.5, recomputed": {"cut": vision.SIZES[3], "engine": RECOMPUTED, "only": ("tp 2", "tp 2 pp 2")},
    "qwen2.5, samples of prompts": {"cut": vision.SIZES[8], "samples": 2, "only": ("tp 2",)},
    "qwen2.5, three rows of positions": {"cut": vision.SIZES[8], "channels": 3, "only": ("one",)},
    "qwen2.5, fused head": {"cut": vision.SIZES[3], "model": {"use_fused_kernels": True}, "only": ("cp 2",)},
    "qwen2.5, tied": {"cut": vision.SIZES[3], "folder": "tied", "only": ("pp 2",)},
    "qwen2": {"cut": vision.SIZES[3], "family": "qwen2_vl", "only": ("one",)},
    "qwen3": {"cut": vision.SIZES[3], "family": "qwen3_vl", "only": ("one", "cp 2", "tp 2 cp 2")},
    "qwen3, recomputed": {
        "cut": vision.SIZES[1], "family": "qwen3_vl", "engine": RECOMPUTED, "only": ("tp 2", "pp 2"),
    },
    "qwen3 moe": DYNAMIC | {"family": "qwen3_vl_moe", "uneven": True},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "frozen": {"cut": vision.SIZES[3], "frozen": True, "only": ("tp 2", "dp 2")},
    "value": {"cut": vision.SIZES[3], "kind": "value_model", "only": ("pp 2", "tp 2 cp 2")},
}

SHARED: dict[str, dict[str, dict[str, Any]]] = {
    "tp 2": {"qwen2.5": {}, "qwen3, values": {"family": "qwen3_vl", "kind": "value_model"}},
    "pp 2": {"qwen3": {"family": "qwen3_vl"}, "qwen2.5, values": {"kind": "value_model"}},
    "tp 2 ep 2": {"qwen3 moe": {"family": "qwen3_vl_moe"}},
}
"""Cases that run with shared prefixes and without."""


def cases_of(layout: str) -> dict[str, dict[str, Any]]:
    """Return the cases that run on a layout.

    Expert parallelism runs models with experts only. The first of two virtual stages has too few layers for Qwen3-VL.
    """
    found = {name: case for name, case in (CASES | OTHERS).items() if layout in case.get("only", (layout,))}
    if "ep 2" in layout:
        return {name: case for name, case in found.items() if case.get("family") == "qwen3_vl_moe"}
    if "virtual" in layout:
        return {name: case for name, case in found.items() if "qwen3" not in case.get("family", "")}
    return found


def folder_of(case: dict[str, Any]) -> str:
    return vision.folder_of(case)


def write_models(root: Path) -> None:
    for name in (*FAMILIES, "tied"):
        family = "qwen2_5_vl" if name == "tied" else name
        vision.write_model(root / name, family, tied=name == "tied", layers=LAYERS)
        tensors, media = vision.rows(family)
        torch.save(vision.positions(vision.load(root / name), tensors, media), root / name / "positions.pt")


def build(folder: Path, layout: dict[str, Any], case: dict[str, Any]) -> Any:
    engine = EngineRegistry.new(
        case.get("kind", "language_model"),
        "megatron",
        model_config=cases.model_config(folder, **case.get("model", {})),
        engine_config=McoreEngineConfig(**layout | case.get("engine", {})),
        optimizer_config=McoreOptimizerConfig(lr=cases.LR, weight_decay=0.01, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=["model", "optimizer", "extra"]
        ),
        freeze_vision_tower=case.get("frozen", False),
    )
    engine.initialize()
    return engine


def run_case(root: Path, layout: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Infer, differentiate, take one step, and export the weights before and after."""
    folder, family = root / folder_of(case), case.get("family", "qwen2_5_vl")
    engine = build(folder, layout, case)
    index = cases.rows_of(engine, case.get("uneven", False))
    index = [row for row in index for _ in range(case.get("samples", 1))]
    data = vision.batch(folder, family, index, case.get("channels", 4), **case["cut"])
    result: dict[str, Any] = {"rows": index, "before": cases.export(engine)}
    with engine.eval_mode():
        result["output"] = engine.infer_batch(data)
    result["images"] = engine.take_images()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, cases.loss_fn)
        result["gradients"] = megatron_cases.gradients(engine)
        result["metrics"] = engine.train_batch(data, cases.loss_fn)
    result["weights"] = cases.export(engine)
    return result


def shared_and_not(root: Path, layout: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    """Infer and differentiate samples of prompts, with shared prefixes and without."""
    folder, family = root / folder_of(case), case.get("family", "qwen2_5_vl")
    found = []
    weights: dict[str, Any] | None = None
    for shares in (True, False):
        engine = build(folder, layout, case | {"model": {"use_prefix_sharing": shares}})
        for module in engine.models:
            if weights is None:
                weights = module.state_dict()
            module.load_state_dict(weights)
        data = vision.samples_of_prompts(folder, family, **DYNAMIC["cut"])
        result: dict[str, Any] = {"tokens": int(data.batch["attention_mask"].sum())}
        with engine.eval_mode():
            result["output"] = engine.infer_batch(data)
        result["images"] = engine.take_images()
        segments = engine.take_segments()
        result["computed"] = sum(until - above for until, above in segments)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            result["metrics"] = engine.forward_backward_batch(data, cases.loss_fn)
            result["gradients"] = megatron_cases.gradients(engine)
        found.append(result)
    return found


def continued(root: Path, layout: dict[str, Any], path: Path) -> dict[str, Any]:
    """Save after one step, restore in a new engine, and take the next step in both."""
    folder = root / "qwen2_5_vl"
    case = {"cut": vision.SIZES[8]}

    def step(engine: Any) -> dict[str, float]:
        data = vision.batch(folder, "qwen2_5_vl", cases.rows_of(engine, False), **case["cut"])
        with engine.train_mode():
            return engine.train_batch(data, cases.loss_fn)

    engine, restored = (build(folder, layout, case) for _ in range(2))
    step(engine)
    engine.save_checkpoint(str(path), global_step=1)
    result: dict[str, Any] = {"saved": cases.export(engine), "expected": step(engine)}
    restored.load_checkpoint(str(path))
    result["restored"] = step(restored)
    result["weights"] = [cases.export(each) for each in (engine, restored)]
    return result


def run_layouts(rank: int, world_size: int, folder: Path) -> None:
    """Run every case of every layout on one rank and save what came out; rank 0 of 2 runs world 1 too."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if (rank, world_size) == (0, 2):
        run_world(0, 1, folder)
        dist.destroy_process_group()
    store = f"file://{folder}/store_{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    run_world(rank, world_size, folder)


def run_world(rank: int, world_size: int, folder: Path) -> None:
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    results: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS[world_size].items():
        runs = {case: partial(run_case, folder, layout, settings) for case, settings in cases_of(name).items()}
        runs |= {
            f"{case}, shared": partial(shared_and_not, folder, layout, settings)
            for case, settings in SHARED.get(name, {}).items()
        }
        if name in CONTINUED:
            runs["continued"] = partial(continued, folder, layout, folder / "checkpoints" / name)
        results[name] = {}
        for case, run in runs.items():
            note(f"{name}, {case}")
            results[name][case] = run()
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"world_{world_size}_rank_{rank}.pt")


CONTINUED = ("tp 2", "pp 2")
