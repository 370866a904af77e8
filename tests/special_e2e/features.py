"""The ways to run one training, each as changes to one base run, and how far a run is from the base.

The base is PPO on one worker with everything that has a number of its own: critic, reference policy, KL and entropy in
the loss, two passes over a batch, so that the ratio moves and is clipped. A feature changes how this is computed, and
none of the numbers.
"""

import json
from dataclasses import dataclass
from typing import Any

from .conftest import Run, Workspace

Overrides = dict[str, Any]

STEPS = 3
ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
ENGINES = (f"{ACTOR}.fsdp_config", f"{CRITIC}.model.fsdp_config", f"{REF}.fsdp_config")
MODELS = ("actor_rollout_ref.model", f"{CRITIC}.model")
GAP = "training/rollout_log_prob_diff_max"


def both(nodes: tuple[str, ...], **values: Any) -> Overrides:
    """Set the same keys below several nodes."""
    return {f"{node}.{key}": value for node in nodes for key, value in values.items()}


def base(workspace: Workspace, name: str) -> Overrides:
    """Return the changes to the smallest run that make it the base."""
    return {
        "algorithm.adv_estimator": "gae",
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.05,
        f"{REF}.log_prob_micro_batch_size_per_gpu": 8,
        f"{CRITIC}.model.path": workspace.model,
        f"{CRITIC}.model.use_remove_padding": True,
        f"{CRITIC}.model.enable_gradient_checkpointing": False,
        f"{CRITIC}.ppo_micro_batch_size_per_gpu": 8,
        f"{CRITIC}.optim.lr": 1e-3,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": -1,
        "trainer.rollout_data_dir": workspace.folder / name / "rollouts",
    }


def workers(count: int, tensor_parallel: int = 1) -> Overrides:
    """Run on several worker processes."""
    return {
        "trainer.n_gpus_per_node": count,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": tensor_parallel,
    }


def micro_batches(rows: int) -> Overrides:
    """Cut every pass of every role into micro-batches of so many rows."""
    return both((ACTOR, CRITIC), ppo_micro_batch_size_per_gpu=rows) | both(
        ("actor_rollout_ref.rollout", REF), log_prob_micro_batch_size_per_gpu=rows
    )


CHECKPOINTING = both(MODELS, enable_gradient_checkpointing=True)
OFFLOAD = both(ENGINES[:2], param_offload=True, optimizer_offload=True) | {f"{ENGINES[2]}.param_offload": True}
ULYSSES = both((ACTOR, CRITIC, REF), ulysses_sequence_parallel_size=2)
DYNAMIC = {
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 128,
    f"{CRITIC}.ppo_max_token_len_per_gpu": 160,
}

SHARING = both(MODELS, use_prefix_sharing=True)

ALL_AT_ONCE = "two workers: Ulysses 2, TP 2, both offloads, gradient checkpointing, dynamic batch, shared prefixes"

FEATURES: dict[str, Overrides] = {
    ALL_AT_ONCE: workers(2, 2) | ULYSSES | OFFLOAD | CHECKPOINTING | DYNAMIC | SHARING,
    "shared prefixes": SHARING,
    "strategy fsdp2": both((ACTOR, CRITIC), strategy="fsdp2"),
    "padded": both(MODELS, use_remove_padding=False),
    "micro-batch size 1": micro_batches(1),
    "micro-batch size 2": micro_batches(2),
    "micro-batch size 4": micro_batches(4),
    "dynamic batch size": DYNAMIC,
    "gradient checkpointing": CHECKPOINTING,
    "activation offload": CHECKPOINTING | both(MODELS, enable_activation_offload=True),
    "entropy in chunks, recomputed": {
        f"{ACTOR}.entropy_from_logits_with_chunking": True,
        f"{ACTOR}.entropy_checkpointing": True,
    },
    "parameter and optimizer offload": OFFLOAD,
    "offload policy": both(ENGINES, offload_policy=True),
    "two workers": workers(2),
    "two workers, TP 2": workers(2, 2),
    "two workers, Ulysses 2": workers(2) | ULYSSES,
    "two workers, fused head": workers(2) | {"actor_rollout_ref.model.use_fused_kernels": True},
    "two workers, hybrid sharding 2 x 1": workers(2) | both(ENGINES, fsdp_size=1),
    "two workers, both offloads, padded, micro-batch size 2": workers(2)
    | OFFLOAD
    | both(MODELS, use_remove_padding=False)
    | micro_batches(2),
    "two workers, offload policy": workers(2) | both(ENGINES, offload_policy=True),
    "four workers, hybrid sharding 2 x 2, TP 2": workers(4, 2)
    | both(ENGINES, fsdp_size=2)
    | {"ray_kwargs.ray_init.num_cpus": 4},  # on fewer cores the workers share them
}

LAYOUT_METRICS = ("global_seqlen/", "training/rollout_", "startup_s/")
"""Metrics that a layout, or rounding alone, decides."""


@dataclass(frozen=True)
class Difference:
    """How far a run is from the base: shares of 1, and differences relative to the larger of |base| and 0.1."""

    same_responses: float
    first_step: tuple[float, str]
    later_steps: tuple[float, str]
    gap: float


def responses(run: Run, step: int) -> list[tuple[str, str, float]]:
    """Return prompt, response and score of every sample of a step, in the order of the prompts."""
    lines = (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"], row["score"]) for row in map(json.loads, lines)]


def gap_of(run: Run) -> float:
    """Return the largest difference between sampled and recomputed log-probabilities in all steps."""
    return max(numbers[GAP] for numbers in run.steps.values())


def compared(run: Run, step: int) -> dict[str, float]:
    """Return the metrics of a step that no feature may change."""
    return {name: value for name, value in run.numbers(step).items() if not name.startswith(LAYOUT_METRICS)}


def largest(expected: dict[str, float], found: dict[str, float]) -> tuple[float, str]:
    """Return the largest difference between two steps and the metric that has it.

    Raises: AssertionError when they have different metrics.
    """
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    return max((abs(found[name] - value) / max(abs(value), 0.1), name) for name, value in expected.items())


def difference(expected: Run, found: Run) -> Difference:
    """Compare two runs step by step."""
    assert sorted(found.steps) == sorted(expected.steps) == list(range(1, STEPS + 1))
    pairs = [
        pair for step in expected.steps for pair in zip(responses(expected, step), responses(found, step), strict=True)
    ]
    steps = [largest(compared(expected, step), compared(found, step)) for step in range(1, STEPS + 1)]
    return Difference(
        same_responses=sum(a == b for a, b in pairs) / len(pairs),
        first_step=steps[0],
        later_steps=max(steps[1:]),
        gap=gap_of(found),
    )
