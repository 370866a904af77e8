"""The mini-batch of ``loss_cases`` on Megatron-Core: every loss and aggregation, by layouts and cuts."""

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from tests.ranks import note
from tests.workers.engine import cases, loss_cases, megatron_cases
from tests.workers.engine.loss_cases import COMBINATIONS, ORDER, VALUE, VALUES
from tests.workers.engine.megatron_cases import CP, PLAIN, PP, TP, VPP

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": PLAIN},
    2: {"tp 2": TP | PLAIN, "pp 2": PP | PLAIN, "dp 2": PLAIN, "cp 2": CP | PLAIN, "pp 2 x 2 virtual": VPP | PLAIN},
    4: {"tp 2 pp 2": TP | PP | PLAIN, "tp 2 dp 2": TP | PLAIN},
}
CUTS: dict[str, dict[str, Any]] = {
    "micro 3, longer padding": {"cut": cases.MICRO[3], "padding": (2, 5)},
    "dynamic, another order": {"cut": cases.dynamic(20), "order": ORDER, "uneven": True},
}
LAYOUT_OF = {layout: (world, sizes) for world, layouts in LAYOUTS.items() for layout, sizes in layouts.items()}

Plan = dict[tuple[str, str], list[tuple[str, str]]]
"""What runs, by layout and cut."""

TWO: Plan = {
    ("tp 2", "dynamic, another order"): [("clip_cov", "seq-mean-token-sum-norm")],
    ("pp 2", "micro 3, longer padding"): [("vanilla", "seq-mean-token-mean")],
}
ALL: Plan = {(layout, cut): COMBINATIONS + VALUES for layout in LAYOUT_OF for cut in CUTS}


def run_layouts(rank: int, world_size: int, folder: Path, plan: Plan) -> None:
    """Run the layouts of so many ranks, and on rank 0 of two before them those of one."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if (rank, world_size) == (0, 2) and any(LAYOUT_OF[layout][0] == 1 for layout, _ in plan):
        run_layouts(0, 1, folder, plan)
        dist.destroy_process_group()
        os.environ.update(WORLD_SIZE="2")
    store = f"file://{folder}/store_{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    found: dict[tuple[str, str], dict[Any, Any]] = {}
    for layout, sizes in LAYOUTS[world_size].items():
        cuts = [cut for cut in CUTS if (layout, cut) in plan]
        if cuts:
            found |= run_layout(folder, layout, sizes, cuts, plan)
            parallel_state.destroy_model_parallel()
    torch.save(found, folder / f"megatron_losses_{world_size}_{rank}.pt")


def run_layout(
    folder: Path, layout: str, sizes: dict[str, Any], cuts: list[str], plan: Plan
) -> dict[tuple[str, str], dict[Any, Any]]:
    """Differentiate each loss of the plan; the critic has an engine of its own, where the plan has its loss."""
    engines = {"policy": megatron_cases.build(folder, sizes)}
    if any(loss == VALUE for cut in cuts for loss, _ in plan[layout, cut]):
        engines[VALUE] = megatron_cases.build(folder, sizes, "value_model")
    found: dict[tuple[str, str], dict[Any, Any]] = {}
    for cut in cuts:
        note(f"{layout}, {cut}")
        variant = CUTS[cut]
        rows = cases.rows_of(engines["policy"], variant.get("uneven", False))
        here: dict[Any, Any] = {"rows": torch.tensor(variant.get("order", range(cases.ROWS)))[rows]}
        for each in plan[layout, cut]:
            engine = engines[VALUE if each[0] == VALUE else "policy"]
            data = loss_cases.batch(variant, rows)
            here[each] = loss_cases.gradient(engine, data, *each, read=megatron_cases.gradients)
        here["on policy"] = loss_cases.on_policy(engines["policy"], loss_cases.batch(variant, rows))
        if VALUE in engines:
            weights = cases.export(engines[VALUE])
            here["head"] = {name: tensor for name, tensor in weights.items() if name.startswith("score")}
        found[layout, cut] = here
    return found


def run_reference(folder: Path, plan: Plan) -> dict[Any, Any]:
    """Do the same by the FSDP engine, in this process and one packed micro-batch."""
    engine = cases.build(folder)
    whole: dict[str, Any] = {"cut": {}}
    rows = list(range(cases.ROWS))
    chosen = {each for combinations in plan.values() for each in combinations if each[0] != VALUE}
    found: dict[Any, Any] = {each: loss_cases.gradient(engine, loss_cases.batch(whole, rows), *each) for each in chosen}
    with engine.eval_mode():
        found["log_probs"] = engine.infer_batch(loss_cases.batch(whole, rows))["log_probs"]
    return found
