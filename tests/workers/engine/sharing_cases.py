"""Batches whose rows begin alike, and engines that share these tokens or not."""

import importlib
import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ranks import note
from tests.utils.batch.test_forest import random_texts
from tests.workers.engine import cases, loss_cases, megatron_cases
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.utils.numerics.seeding import sampling_seeds
from verl.workers.engine import BaseEngine
from verl.workers.engine.passes import PassSpec, pack_shared_rows, split_batch

PROMPT, RESPONSE = 24, 24


def padded(prompts: list[list[int]], responses: list[list[int]], masks: list[list[int]] | None = None) -> DataProto:
    """Return rows with prompts padded on the left and responses on the right."""
    rows = len(prompts)
    ids = torch.zeros(rows, PROMPT + RESPONSE, dtype=torch.long)
    held = torch.zeros_like(ids)
    mask = torch.zeros(rows, RESPONSE, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        text = torch.tensor([*prompt, *response], dtype=torch.long)
        first = PROMPT - len(prompt)
        ids[row, first : first + len(text)] = text
        held[row, first : first + len(text)] = 1
        counted = [1] * len(response) if masks is None else masks[row]
        mask[row, : len(response)] = torch.tensor(counted, dtype=torch.long)
    generator = torch.Generator().manual_seed(rows)
    data = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": held,
            "position_ids": (held.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, PROMPT:],
            "response_mask": mask,
            "advantages": torch.randn(rows, RESPONSE, generator=generator),
        }
    )
    data.meta_info.update(temperature=cases.TEMPERATURE, calculate_entropy=True)
    return data


def groups(seed: int = 0, prompts: int = 3, samples: int = 4) -> DataProto:
    """Return samples of prompts, two of which have a common beginning, in an order that mixes the groups.

    Three samples of one prompt are equal.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, cases.VOCAB, (count,), generator=generator).tolist()

    system = draw(10)
    asked = [system + draw(9), system + draw(12), *(draw(8 + number) for number in range(prompts - 2))]
    answers = [draw(5 + 4 * (row % 4)) for row in range(prompts * samples)]
    answers[1 + prompts] = answers[1 + 2 * prompts] = answers[1]  # two of them are on one of two ranks
    return padded([asked[row % prompts] for row in range(len(answers))], answers)


def branches(seed: int) -> DataProto:
    """Return the rows of random trees of depth 5, cut anywhere into prompt and response: branched trajectories.

    The same token may count in one row and not in another.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts, responses, masks = [], [], []
    for text in random_texts(seed, count=10, depth=5):
        text = [1, 2, 1, *(3 + token for token in text)][: PROMPT + RESPONSE]  # no row is empty
        low, high = max(1, len(text) - RESPONSE), min(len(text), PROMPT)
        cut = int(torch.randint(low, high + 1, (), generator=generator))
        prompts.append(text[:cut])
        responses.append(text[cut:])
        masks.append((torch.rand(len(text) - cut, generator=generator) < 0.7).long().tolist())
    return padded(prompts, responses, masks)


@st.composite
def trees(draw: st.DrawFn) -> DataProto:
    """Draw rows that are paths of trees of up to 5 segments, not all to a leaf; segments may be short or alike."""
    token = st.integers(3, 5)

    def grow(path: list[int], depth: int) -> list[list[int]]:
        path = path + draw(st.lists(token, min_size=1 if depth == 1 else 0, max_size=11))
        below = draw(st.integers(0, 3)) if depth < 5 else 0
        rows = [row for _ in range(below) for row in grow(path, depth + 1)]
        return rows + [path] if not rows or draw(st.booleans()) else rows

    texts = [row for _ in range(draw(st.integers(1, 2))) for row in grow([1], 1)]
    texts = [(text + [4] * 2)[: PROMPT + RESPONSE] for text in texts[:12]]  # all have a prompt and a response
    cuts = [draw(st.integers(max(1, len(text) - RESPONSE), min(len(text) - 1, PROMPT))) for text in texts]
    return padded(
        [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
        [text[cut:] for text, cut in zip(texts, cuts, strict=True)],
    )


def drawn_trees(count: int) -> list[DataProto]:
    """Return the same trees on every rank: where one fails, hypothesis would go on with others there alone."""
    found: list[DataProto] = []

    @settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=trees())
    def keep(data: DataProto) -> None:
        found.append(data)

    keep()
    return found


def oddities() -> dict[str, DataProto]:
    """Return rows that share everything or count nothing, with odd and even numbers of distinct tokens."""
    generator = torch.Generator().manual_seed(4)
    first, second, third = (
        torch.randint(3, cases.VOCAB, (count,), generator=generator).tolist() for count in (11, 10, 7)
    )
    nothing = padded([first] * 6, [second, third] * 3)
    for row, tokens in ((1, 0), (2, 0), (4, 1), (5, 1)):  # all padding, and what fills a batch
        for name in ("attention_mask", "response_mask", "position_ids"):
            nothing.batch[name][row] = 0
        nothing.batch["attention_mask"][row, :tokens] = 1
    return {
        "equal, odd": padded([first] * 6, [second] * 6),
        "equal, even": padded([first] * 6, [third] * 6),
        "a token each": padded([first] * 6, [[token] for token in (5, 5, 6, 7, 7, 7)]),
        "a token after a token": padded([[3]] * 6, [[token] for token in (7, 7, 8, 8, 9, 9)]),
        "other tokens count": padded([first] * 4, [second] * 4, [[1, 0] * 5, [0, 1] * 5, [1] * 10, [0] * 10]),
        "a pass without counted tokens": padded(
            [first] * 6, [second] * 3 + [third] * 3, [[0] * 10] * 3 + [[1] * 7] * 3
        ),
        "rows end inside others": padded([first] * 6, [second[:count] for count in (10, 9, 8, 2, 1, 10)]),
        "responses are prompts": padded(
            [first, first + second[:3], first + second[:9], first[:9]],
            [second + third, second[3:] + third, second[9:] + third, first[9:] + second],
        ),
        "padding": nothing,
    }


def distinct_tokens(data: DataProto) -> int:
    """Return the tokens that a pass over these rows computes."""
    return int(pack_shared_rows(data).input_ids.numel())


def with_old_numbers(data: DataProto) -> DataProto:
    """Add what the losses of the roles read."""
    rows = len(data)
    generator = torch.Generator().manual_seed(9)

    def draw(scale: float, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(rows, RESPONSE, generator=generator)

    data.batch["old_log_probs"], data.batch["ref_log_prob"] = draw(0.8, -4.6), draw(0.5, -4.6)
    data.batch["values"], data.batch["returns"] = draw(0.5), draw(1.0)
    data.batch["rollout_is_weights"] = draw(0.2).exp()
    data.batch["sampling_seed"] = sampling_seeds(1, 1, rows, 1)
    return data


def build(
    folder: Path,
    shares: bool,
    kind: str = "language_model",
    engine: dict[str, Any] | None = None,
    **model: Any,
) -> BaseEngine:
    return cases.build(folder, {"use_remove_padding": True, "use_prefix_sharing": shares} | model, engine, kind)


def outputs(engine: BaseEngine, data: DataProto) -> dict[str, Tensor]:
    with engine.eval_mode():
        return engine.infer_batch(data)


def gradients(
    engine: BaseEngine, data: DataProto, loss: Any = cases.loss_fn
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and the gradient of a mini-batch."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(data, loss)
        return metrics, {name: each.clone() for name, each in loss_cases.gradients(engine).items()}


def descend(engine: BaseEngine, data: DataProto, loss: Any = cases.loss_fn, steps: int = 3) -> dict[str, Tensor]:
    """Return the whole weights after steps of gradient descent, whose size depends on the gradient, unlike Adam's."""
    before = weights(engine)
    with engine.train_mode():
        for _ in range(steps):
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, loss)
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
    return moved(before, weights(engine))


RATE = 0.1
"""Learning rate of gradient descent."""


def weights(engine: BaseEngine) -> dict[str, Tensor]:
    """Return the whole weights; collective."""
    return {name: full_tensor(each.detach()).clone() for name, each in engine.module.named_parameters()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights after steps that moved some of them a thousand times as far as they may lie apart."""
    assert max(float((after[name] - each).abs().max() / each.abs().max()) for name, each in before.items()) > 1e-2
    return after


def adam(engine: BaseEngine, data: DataProto, loss: Any = cases.loss_fn) -> dict[str, Tensor]:
    """Return the weights after a step of the engine's optimizer."""
    with engine.train_mode():
        engine.train_batch(data, loss)
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


# Worlds of one and two ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"cut": cases.MICRO[4]},
    "sharded, dynamic": {"cut": cases.dynamic(60), "model": {"enable_gradient_checkpointing": True}},
    "ulysses": {"cut": cases.MICRO[3], "engine": {"ulysses_sequence_parallel_size": 2}},
    "ulysses, fused, adapters": {
        "cut": cases.dynamic(60),
        "engine": {"ulysses_sequence_parallel_size": 2},
        "model": {"lora_rank": 4, "lora_alpha": 8, "use_fused_kernels": True},
    },
    "ulysses, values": {
        "cut": cases.MICRO[4],
        "engine": {"ulysses_sequence_parallel_size": 2},
        "kind": "value_model",
    },
}


def run_world(rank: int, world: int, folder: Path, store: str) -> None:
    """Compute outputs and gradients with and without sharing, and save them by layout."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {}
    for name, layout in LAYOUTS.items():
        note(name)
        kind = layout.get("kind", "language_model")
        loss = cases.loss_fn
        for shares in (False, True):
            engine = build(folder, shares, kind, layout.get("engine"), **layout.get("model", {}))
            data = groups()
            data.meta_info.update(layout["cut"])
            size = engine.get_data_parallel_size()
            mine = data.select_idxs(list(range(engine.get_data_parallel_rank(), len(data), size)))
            metrics, gradient = gradients(engine, mine, loss)
            results[name, shares] = {
                "output": outputs(engine, mine),
                "gradient": gradient,
                "metrics": metrics,
                "weights": descend(engine, mine, loss),
            }
    torch.save(results, folder.parent / f"sharing_rank_{rank}.pt")
    dist.destroy_process_group()


# Every loss, with every aggregation, in every layout

FUSED = {"use_fused_kernels": True}
LORA = {"lora_rank": 4, "lora_alpha": 8}
CHECKPOINTED = {"enable_gradient_checkpointing": True}
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
ULYSSES = {"ulysses_sequence_parallel_size": 2}

PRODUCT: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "micro 5": {"cut": {"micro_batch_size_per_gpu": 5}},
        "dynamic": {"cut": cases.dynamic(60)},
        "whole, fused head, checkpointing": {"cut": {}, "model": FUSED | CHECKPOINTED},
        "adapters": {"cut": cases.MICRO[4], "model": LORA},
        "fsdp2, offload": {"cut": cases.MICRO[3], "engine": {"strategy": "fsdp2"} | OFFLOAD},
        "branches": {"cut": cases.dynamic(90), "rows": lambda: branches(2)},
        "branches, adapters, fused head": {"cut": cases.MICRO[4], "rows": lambda: branches(3), "model": LORA | FUSED},
        "llama": {"cut": cases.MICRO[4], "folder": "llama"},
        "llama, branches, checkpointing": {
            "cut": cases.dynamic(60), "folder": "llama", "rows": lambda: branches(1), "model": CHECKPOINTED,
        },
        "experts": {"cut": cases.MICRO[4], "folder": "qwen3_moe"},
    },
    2: {
        "two ranks": {"cut": cases.MICRO[4]},
        "two ranks, dynamic, branches": {"cut": cases.dynamic(60), "rows": lambda: branches(2), "model": CHECKPOINTED},
        "two ranks, fsdp2, fused head": {"cut": cases.MICRO[3], "engine": {"strategy": "fsdp2"}, "model": FUSED},
        "ulysses": {"cut": cases.MICRO[3], "engine": ULYSSES},
        "ulysses, adapters, dynamic": {"cut": cases.dynamic(60), "engine": ULYSSES, "model": LORA},
        "ulysses, experts": {"cut": cases.MICRO[4], "engine": ULYSSES, "folder": "qwen3_moe"},
    },
}  # fmt: skip


def run_product(rank: int, world: int, root: Path) -> None:
    """Compute the gradient of all losses with and without sharing, and save how far apart they are, by layout."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{root}/store_product", rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for name, layout in PRODUCT[world].items():
        note(name)
        data = with_old_numbers(layout.get("rows", groups)())
        data.meta_info.update(layout["cut"])
        results[name] = {}
        for kind in ("language_model", "value_model"):
            place = (root / layout.get("folder", "qwen2"), kind, layout.get("engine"), layout.get("model", {}))
            plain, shared = (build(place[0], shares, *place[1:3], **place[3]) for shares in (False, True))
            shared.module.load_state_dict(plain.module.state_dict())
            size, first = plain.get_data_parallel_size(), plain.get_data_parallel_rank()
            mine = data.select_idxs(list(range(first, len(data), size)))
            for each in loss_cases.COMBINATIONS if kind == "language_model" else loss_cases.VALUES:
                expected, found = (loss_cases.gradient(engine, mine, *each) for engine in (plain, shared))
                apart = (found["gradient"] - expected["gradient"]).norm() / expected["gradient"].norm()
                results[name][each] = {
                    "apart": float(apart) if found["names"] == expected["names"] else float("inf"),
                    "norm": float(expected["gradient"].norm()),
                    "metrics": (found["metrics"], expected["metrics"]),
                }
    torch.save(results, root / f"product_{world}_{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


# Megatron-Core

MCORE: dict[str, dict[str, Any]] = {
    "tp 2": {"cut": cases.MICRO[4], "engine": megatron_cases.TP, "odd": cases.MICRO[3]},
    "tp 2, experts": {"cut": cases.MICRO[4], "engine": megatron_cases.TP, "folder": "qwen3_moe"},
    "pp 2 x 2 virtual, rope scaling, fused head, checkpoints": {
        "cut": cases.dynamic(60),
        "engine": megatron_cases.VPP,
        "folder": "llama",
        "model": {"use_fused_kernels": True, "enable_gradient_checkpointing": True},
    },
    "dp 2, values": {"cut": cases.dynamic(60), "engine": megatron_cases.PLAIN, "kind": "value_model"},
}

TREES = 4
WHOLE, FLAT = megatron_cases.ETP1, {"sequence_parallel": False}
MORE_MCORE: dict[str, dict[str, Any]] = {
    "tp 2": {"engine": megatron_cases.TP},
    "tp 2, whole sequences": {"engine": megatron_cases.TP | FLAT},
    "tp 2, fused head, tied": {"engine": megatron_cases.TP, "folder": "tied", "model": FUSED},
    "tp 2, recomputed": {
        "engine": megatron_cases.TP | {"override_transformer_config": megatron_cases.RECOMPUTE}, "folder": "llama",
    },
    "tp 2, values": {"engine": megatron_cases.TP, "kind": "value_model"},
    "tp 2 ep 2": {"engine": megatron_cases.TP | megatron_cases.EP | WHOLE, "folder": "qwen3_moe"},
    "pp 2": {"engine": megatron_cases.PP, "folder": "qwen3_moe_mixed"},
    "pp 2, values": {"engine": megatron_cases.PP, "kind": "value_model"},
    "pp 2 x 2 virtual, fused head": {"engine": megatron_cases.VPP, "folder": "llama", "model": FUSED},
    "dp 2, overlapped, offloaded": {"engine": megatron_cases.OVERLAP | megatron_cases.OFFLOAD},
    "ep 2": {"engine": megatron_cases.EP, "folder": "qwen3_moe"},
}  # fmt: skip
"""Layouts for odd rows and random trees alone."""


def odd_results(engine: Any, cut: dict[str, Any], step: int = 1) -> dict[str, dict[str, Any]]:
    """Return outputs, gradients and metrics of odd rows and of random trees, of which data-parallel rank 0 has one.

    Args: every ``step``-th batch is run.
    """
    rows = oddities() | {f"tree {at}": tree for at, tree in enumerate(drawn_trees(TREES))}
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    results = {}
    for name, data in list(rows.items())[::step]:
        note(name)
        mine = data
        if size > 1 and len(data) > 1:
            mine = data.select_idxs(list(range(1, len(data))) if rank else [0])
        mine.meta_info.update(cut)
        output = outputs(engine, mine)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            metrics = engine.forward_backward_batch(mine, cases.loss_fn)
            gradient = megatron_cases.gradients(engine)
        results[name] = {"output": output, "gradient": gradient, "metrics": metrics}
    return results


def build_mcore(folder: Path, case: dict[str, Any], shares: bool) -> Any:
    """Return the engine of a case."""
    path = folder / case.get("folder", "plain")
    model = cases.model_config(path, use_prefix_sharing=shares, **case.get("model", {}))
    return megatron_cases.build(path, case["engine"], case.get("kind", "language_model"), model=model)


def run_mcore_odd(rank: int, world: int, folder: Path) -> None:
    """Save what odd rows and random trees give in more layouts, with and without sharing."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_odd", rank=rank, world_size=world)
    importlib.import_module("verl.workers.engine.megatron")
    from megatron.core import parallel_state

    results = {}
    for name, case in MORE_MCORE.items():
        note(name)
        for shares in (False, True):
            engine = build_mcore(folder, case, shares)
            results[name, shares] = odd_results(engine, cases.dynamic(51))
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"odd_{rank}.pt")


def descend_mcore(engine: Any, data: DataProto, steps: int = 3) -> dict[str, Tensor]:
    """Return what ``descend`` does: the whole weights, by checkpoint names."""
    before = cases.export(engine)
    with engine.train_mode():
        for _ in range(steps):
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, cases.loss_fn)
            whole = megatron_cases.whole_gradients(engine)
            with torch.no_grad():
                for parameter in chain.from_iterable(model.parameters() for model in engine.models):
                    parameter -= RATE * whole[parameter]
    return moved(before, cases.export(engine))


def run_mcore(rank: int, world: int, folder: Path) -> None:
    """Compute outputs and gradients with and without sharing, and save them by layout."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    results = {}
    for name, case in MCORE.items():
        note(name)
        for shares in (False, True):
            engine = build_mcore(folder, case, shares)
            data = groups()
            data.meta_info.update(case["cut"])
            size = engine.get_data_parallel_size()
            mine = data.select_idxs(list(range(engine.get_data_parallel_rank(), len(data), size)))
            with engine.train_mode():
                engine.optimizer_zero_grad()
                metrics = engine.forward_backward_batch(mine, cases.loss_fn)
                gradient = megatron_cases.gradients(engine)
            segments = engine.take_segments()
            spec = PassSpec.from_meta(data.meta_info)
            distinct = [distinct_tokens(each.rows) for each in split_batch(mine, spec, shares_prefixes=True)]
            results[name, shares] = {
                "output": outputs(engine, mine),
                "gradient": gradient,
                "metrics": metrics,
                "odd": odd_results(engine, case["odd"], step=2) if "odd" in case else {},
                "weights": descend_mcore(engine, mine),
                "computed": sum(until - above for until, above in segments),
                "distinct": sum(distinct),
                "tokens": int(mine.batch["attention_mask"].sum()),
            }
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"sharing_{rank}.pt")
