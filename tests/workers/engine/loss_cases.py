"""One mini-batch under every loss and aggregation, cut, laid out, packed, ordered and padded in several ways."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.ranks import note
from tests.workers.engine import cases, real_losses
from verl.algos.names import POLICY_LOSSES
from verl.algos.policy_loss import effective_loss_agg_mode, get_token_selector
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.utils.numerics.seeding import sampling_seeds
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine
from verl.workers.roles.losses import SELECTION, ppo_loss, select_tokens, value_loss

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = tuple(POLICY_LOSSES)
COMBINATIONS = [(loss, mode) for loss in LOSSES for mode in MODES if effective_loss_agg_mode(loss, mode) == mode]
"""A loss that aggregates in one way only is asked for that one."""
VALUE = "value"
VALUES = [(VALUE, mode) for mode in MODES]
"""The loss of the critic, on an engine of its own."""

OPTIONS = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}

ORDER = [5, 2, 7, 0, 3, 6, 1, 4]
PADDED = {"model": cases.PADDED}
ULYSSES = {"engine": {"ulysses_sequence_parallel_size": 2}}
FSDP2 = {"engine": {"strategy": "fsdp2"}}

VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "whole": {"cut": {}},
        "micro 1": {"cut": cases.MICRO[1]},
        "micro 3": {"cut": cases.MICRO[3]},
        "dynamic": {"cut": cases.dynamic(20)},
        "another order": {"cut": cases.MICRO[2], "order": ORDER},
        "longer padding": {"cut": cases.MICRO[4], "padding": (2, 5)},
        "unpacked": PADDED | {"cut": cases.MICRO[4]},
        "unpacked, micro 1, longer padding": PADDED | {"cut": cases.MICRO[1], "padding": (3, 4)},
    },
    2: {
        "two ranks": {"cut": cases.MICRO[2]},
        "two ranks, uneven, another order": {"cut": cases.MICRO[2], "order": ORDER, "uneven": True},
        "two ranks, unpacked, dynamic": PADDED | {"cut": cases.dynamic(20), "uneven": True},
        "two ranks, longer padding": {"cut": cases.MICRO[1], "padding": (2, 5)},
        "ulysses": ULYSSES | {"cut": cases.MICRO[3]},
        "two ranks, fsdp2": FSDP2 | {"cut": cases.MICRO[1]},
    },
}
BASE = "whole"

Plan = dict[str, list[tuple[str, str]]]


def pairwise() -> Plan:
    """Every variant with every loss, and with every aggregation; the base with all combinations."""
    plan: Plan = {}
    for at, name in enumerate([*VARIANTS[1], *VARIANTS[2]]):
        chosen = []
        for number, loss in enumerate(LOSSES):
            modes = [mode for name, mode in COMBINATIONS if name == loss]
            chosen.append((loss, modes[(at + number) % len(modes)]))
        plan[name] = chosen
    return plan | {BASE: COMBINATIONS}


def some_values() -> Plan:
    """The loss of the critic by each aggregation that is no mean over tokens, each in another variant."""
    chosen = ("dynamic", "unpacked, micro 1, longer padding", "two ranks, uneven, another order")
    return {name: [each] for name, each in zip(chosen, VALUES[1:], strict=True)} | {BASE: VALUES}


def full(combinations: list[tuple[str, str]]) -> Plan:
    """Everything with everything."""
    return dict.fromkeys(itertools.chain(VARIANTS[1], VARIANTS[2]), combinations)


def joined(policies: Plan, values: Plan) -> Plan:
    return {name: policies[name] + values.get(name, []) for name in policies}


def critic(mode: str) -> FSDPCriticConfig:
    return FSDPCriticConfig(
        ppo_micro_batch_size_per_gpu=1,
        cliprange_value=real_losses.CLIP_VALUE,
        loss_agg_mode=mode,
        loss_scale_factor=cases.RESPONSE,
    )


def config(loss: str, mode: str) -> FSDPActorConfig:
    return FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss, **OPTIONS),
        loss_agg_mode=mode,
        loss_scale_factor=cases.RESPONSE,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type="low_var_kl+",
    )


def batch(variant: dict[str, Any], rows: list[int], **meta: Any) -> DataProto:
    """The rows of a rank, in the order and with the padding of a variant; NaN where nothing may be read."""
    generator = torch.Generator().manual_seed(11)
    weights = (0.2 * torch.randn(cases.ROWS, cases.RESPONSE, generator=generator)).exp()
    tensors = cases.tensors() | real_losses.columns() | {"rollout_is_weights": weights}
    for name in ("advantages", "rollout_is_weights", *real_losses.columns()):
        tensors[name] = tensors[name].masked_fill(tensors["response_mask"] == 0, torch.nan)
    left, right = variant.get("padding", (0, 0))
    for name, value in tensors.items():
        whole = name in ("input_ids", "attention_mask", "position_ids")
        fill = torch.nan if value.is_floating_point() else 0
        tensors[name] = torch.nn.functional.pad(value, (left if whole else 0, right), value=fill)
    tensors["sampling_seed"] = sampling_seeds(1, 1, cases.ROWS, 1)
    index = torch.tensor(variant.get("order", range(cases.ROWS)))[rows]
    data = DataProto.from_dict(tensors={name: value[index] for name, value in tensors.items()})
    data.meta_info = {"temperature": cases.TEMPERATURE, "calculate_entropy": True, **variant["cut"], **meta}
    return data


def gradients(engine: BaseEngine) -> dict[str, Tensor]:
    named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
    return {name: full_tensor(grad) for name, grad in named.items()}


def gradient(
    engine: BaseEngine,
    data: DataProto,
    loss: str,
    mode: str,
    read: Callable[[Any], dict[str, Tensor]] = gradients,
) -> dict[str, Any]:
    """Return metrics and the whole gradient of a mini-batch as one vector, and leave the weights as they are."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        if loss == VALUE:
            metrics = engine.forward_backward_batch(data, partial(value_loss, critic(mode)))
        else:
            actor = config(loss, mode)
            select_tokens(actor, engine, data)
            metrics = engine.forward_backward_batch(data, partial(ppo_loss, actor))
        found = read(engine)
    return {"metrics": metrics, "names": sorted(found), "gradient": as_vector(found)}


def as_vector(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[name].flatten().double() for name in sorted(named)])


def on_policy(engine: BaseEngine, data: DataProto) -> dict[str, Any]:
    """Return the log-probabilities, whether each micro-batch of training sees the same, and by loss its clips and KL.

    The old log-probabilities stand in the batch: the loss does not put the new ones in their place.
    """
    with engine.eval_mode():
        data.batch["old_log_probs"] = engine.infer_batch(data)["log_probs"]
    found: dict[str, Any] = {"log_probs": data.batch["old_log_probs"]}
    equal: list[bool] = []
    for loss in LOSSES:
        actor = config(loss, "seq-mean-token-mean")
        if get_token_selector(loss) is not None:  # what it takes out by itself is not a clip of the ratio
            data.batch[SELECTION] = torch.zeros_like(data.batch["response_mask"], dtype=torch.bool)

        def watched(output: dict[str, Tensor], rows: DataProto, actor: FSDPActorConfig = actor) -> Any:
            keep = rows.batch["response_mask"].bool()
            equal.append(torch.equal(output["log_probs"][keep], rows.batch["old_log_probs"][keep]))
            return ppo_loss(actor, output, rows)

        with engine.train_mode():
            metrics = engine.forward_backward_batch(data, watched)
        found[loss] = {name: metrics[f"actor/{name}"] for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")}
    found["equal"] = equal
    return found


class Engines:
    """The engines of a world; the same one where model, layout and packing are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built: dict[str, BaseEngine] = {}

    def __call__(self, variant: dict[str, Any], loss: str) -> BaseEngine:
        kind = "value_model" if loss == VALUE else "language_model"
        key = str((variant.get("model"), variant.get("engine"), kind))
        if key not in self._built:
            self._built[key] = cases.build(self.folder, variant.get("model"), variant.get("engine"), kind)
        return self._built[key]


def run_world(rank: int, world_size: int, folder: Path, store: str, plan: Plan) -> None:
    """Run the variants of a world on one rank and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results: dict[str, Any] = {}
    engines = Engines(folder)
    for name, variant in VARIANTS[world_size].items():
        note(name)
        engine = engines(variant, LOSSES[0])
        rows = cases.rows_of(engine, variant.get("uneven", False))
        results[name] = {each: gradient(engines(variant, each[0]), batch(variant, rows), *each) for each in plan[name]}
        results[name]["on policy"] = on_policy(engine, batch(variant, rows))
        results[name]["rows"] = torch.tensor(variant.get("order", range(cases.ROWS)))[rows]
        if name == BASE:
            weights = cases.export(engines(variant, VALUE))
            results[name]["head"] = {key: tensor for key, tensor in weights.items() if key.startswith("score")}
    torch.save(results, folder / f"losses_{world_size}_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()
