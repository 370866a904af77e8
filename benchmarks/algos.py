"""Cost of the algorithms on the driver, in multiples of one pass: ``torch.addcmul(a, b, c)`` over (1024, 2048) fp32.

python benchmarks/algos.py                 a table
python benchmarks/algos.py --check         exit 1 where a cost is above its limit
python benchmarks/algos.py --only gae --json

It measures in one thread and one process. The pass runs before and after each measured call, so that machine and
allocator are in the same state for both; the result is the median of the ratios. Results: docs/perf/algos.md.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROWS = 1024
WIDTH = 2048
SAMPLES = 8
WARMUP = 3


class Case(NamedTuple):
    """A measured call, its limit in passes (None: no limit) and the width of the pass."""

    name: str
    run: Callable[[], Any]
    limit: float | None = None
    width: int = WIDTH


def make_batch(width: int = WIDTH, hole: int = 0) -> dict[str, Any]:
    """Make a batch with rows of uneven length in groups of ``SAMPLES``, and slightly different old log-probabilities.

    Unless ``hole`` is 0, a tenth of the tokens within a response is masked out, in runs of ``hole`` tokens.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (ROWS,), generator=generator)
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    if hole:
        kept = torch.rand(ROWS, width // hole, generator=generator) > 0.1
        # The shift keeps the holes from ending at multiples of their size.
        mask &= kept.repeat_interleave(hole, dim=-1).roll(29, dims=-1)
    rewards = torch.zeros(ROWS, width)
    rewards[torch.arange(ROWS), lengths - 1] = torch.randint(0, 2, (ROWS,), generator=generator).float()
    log_prob = -torch.rand(ROWS, width, generator=generator)
    drift = [0.02 * torch.randn(ROWS, width, generator=generator) for _ in range(2)]
    return {
        "token_level_rewards": rewards,
        "values": torch.rand(ROWS, width, generator=generator),
        "reward_baselines": torch.rand(ROWS, generator=generator),
        "response_mask": mask.long(),
        "index": np.repeat([str(uuid.UUID(int=i)) for i in range(ROWS // SAMPLES)], SAMPLES).astype(object),
        "log_prob": log_prob,
        "old_log_prob": log_prob + drift[0],
        "rollout_log_prob": log_prob + drift[1],
    }


def advantage_cases() -> Iterator[Case]:
    """Yield every advantage estimator, with the usual discounts of PPO."""
    from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY
    from verl.algos.config import AlgoConfig

    config = AlgoConfig(gamma=0.99, lam=0.95)
    names = ("token_level_rewards", "values", "reward_baselines", "response_mask", "index")
    batch, tools, scattered = (
        {name: made[name] for name in names} for made in map(make_batch, 3 * [WIDTH], (0, 64, 1))
    )
    for name, estimate in ADV_ESTIMATOR_REGISTRY.items():
        yield Case(name, lambda estimate=estimate: estimate(**batch, config=config))
    for name in ("gae", "reinforce_plus_plus"):
        estimate = ADV_ESTIMATOR_REGISTRY[name]
        yield Case(f"{name}, tool tokens", lambda estimate=estimate: estimate(**tools, config=config))
        yield Case(f"{name}, scattered mask", lambda estimate=estimate: estimate(**scattered, config=config))


def loss_cases() -> Iterator[Case]:
    """Yield the forward pass of every policy loss, which records the graph for its gradient as in training."""
    from verl.algos.policy_loss import POLICY_LOSS_REGISTRY
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1)
    batch = make_batch()
    advantages = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1)) * batch["response_mask"]
    log_prob = batch["log_prob"].requires_grad_()
    for name, loss in POLICY_LOSS_REGISTRY.items():
        arguments = (batch["old_log_prob"], log_prob, advantages, batch["response_mask"], "token-mean", config)
        yield Case(f"loss {name}", lambda loss=loss, arguments=arguments: loss(*arguments))


def entropy_cases() -> Iterator[Case]:
    """Yield forward and backward pass of the entropy of 8192 tokens over a vocabulary of 8192."""
    from verl.utils.torch_functional import entropy_from_logits

    logits = torch.randn(64, 128, 8192, generator=torch.Generator().manual_seed(0)).mul_(3).requires_grad_()

    def run() -> None:
        logits.grad = None
        entropy_from_logits(logits).mean().backward()

    def forward() -> None:
        with torch.no_grad():
            entropy_from_logits(logits)

    yield Case("entropy, forward and backward", run, 130.0)
    yield Case("entropy, forward", forward)


def rollout_is_cases() -> Iterator[Case]:
    """Yield the rollout importance weights with all of their metrics, over rows of twice the width."""
    try:
        helper = importlib.import_module("verl.trainer.ppo.mismatch_helper")
    except ModuleNotFoundError:
        return
    width = 2 * WIDTH
    batch = make_batch(width)
    tensors = [batch[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "mask"):
            options = {"rollout_is_level": level, "rollout_is_mode": mode, "rollout_is_threshold": 2.0}
            run = lambda options=options: helper.compute_rollout_importance_weights(*tensors, **options)  # noqa: E731
            yield Case(f"rollout weights, {level}, {mode}", run, width=width)


def partition_cases() -> Iterator[Case]:
    """Yield the balanced partition of 4096 lengths into 64 parts."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    lengths = np.random.default_rng(0).integers(1, 8193, 4096).tolist()

    def run(equal_size: bool) -> None:
        parts = get_seqlen_balanced_partitions(lengths, 64, equal_size)
        totals = [sum(lengths[i] for i in part) for part in parts]
        if max(totals) - min(totals) > 1:
            raise AssertionError(f"the parts differ by {max(totals) - min(totals)} tokens")

    yield Case("partition", lambda: run(False), 20.0)
    yield Case("partition, equal sizes", lambda: run(True), 20.0)


def metric_cases() -> Iterator[Case]:
    """Yield the validation metrics of 512 prompts with 16 responses each, and the metrics of a training batch."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics, process_validation_metrics

    rng = np.random.default_rng(0)
    uids = [f"p{i}" for i in range(512) for _ in range(16)]
    right = rng.integers(0, 2, len(uids))
    infos = {
        "reward": right.astype(float).tolist(),
        "acc": right.tolist(),
        "pred": rng.integers(0, 9, len(uids)).astype(str).tolist(),
    }
    sources = ["math"] * len(uids)
    yield Case("validation metrics", lambda: process_validation_metrics(sources, uids, infos), 100.0)
    made = make_batch()
    tensors: dict[str, Tensor] = {
        "attention_mask": torch.cat([torch.ones(ROWS, 512, dtype=torch.long), made["response_mask"]], dim=-1),
        "response_mask": made["response_mask"],
        "responses": torch.zeros(ROWS, WIDTH, dtype=torch.long),
        "values": made["values"],
        **dict.fromkeys(("token_level_scores", "token_level_rewards"), made["token_level_rewards"]),
        **dict.fromkeys(("advantages", "returns"), made["log_prob"]),
    }
    batch = DataProto.from_dict(tensors)
    yield Case("data metrics", lambda: compute_data_metrics(batch))


def seconds(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call; other processes disturb them less than wall time."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Run the pass before and after each call of the case, and return the median of their ratios."""
    a, b, c = (torch.randn(ROWS, case.width, generator=torch.Generator().manual_seed(i)) for i in range(3))
    one_pass = lambda: torch.addcmul(a, b, c)  # noqa: E731
    calls = [(seconds(one_pass), seconds(case.run), seconds(one_pass)) for _ in range(WARMUP + repeats)][WARMUP:]
    cost = statistics.median(2 * case_s / (before + after) for before, case_s, after in calls)
    case_s = statistics.median(case_s for _, case_s, _ in calls)
    pass_s = statistics.median((before + after) / 2 for before, _, after in calls)
    over = case.limit is not None and cost > case.limit
    return {"name": case.name, "passes": round(cost, 2), "limit": case.limit, "ms": round(case_s * 1e3, 3),
            "pass_ms": round(pass_s * 1e3, 3), "over": over}  # fmt: skip


def main() -> int:
    """Measure and report; return 1 if ``--check`` finds a cost above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure only cases whose name contains this text")
    parser.add_argument("--repeats", type=int, default=15, help="measured calls of each case (default: 15)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a cost is above its limit")
    parser.add_argument("--json", action="store_true", help="one JSON line per case instead of the table")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    torch.set_num_threads(1)
    generators = (advantage_cases, loss_cases, entropy_cases, rollout_is_cases, partition_cases, metric_cases)
    cases = [case for generate in generators for case in generate() if args.only in case.name]
    if not cases:
        parser.error(f"no case has {args.only!r} in its name")
    results = []
    if not args.json:
        print(f"{'':38}{'passes':>8}{'limit':>7}{'ms':>9}{'pass ms':>9}")
    for case in cases:
        row = measure(case, args.repeats)
        results.append(row)
        limit = "" if row["limit"] is None else f"{row['limit']:g}"
        line = f"{row['name']:38}{row['passes']:8.2f}{limit:>7}{row['ms']:9.2f}{row['pass_ms']:9.2f}"
        print(json.dumps(row) if args.json else line + ("  OVER" if row["over"] else ""), flush=True)
    return int(args.check and any(row["over"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
