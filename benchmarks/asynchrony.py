"""Measure asynchronous training on two CPU cores, with few long responses and a slow reward (see long_tail.py).

python benchmarks/asynchrony.py settings
python benchmarks/asynchrony.py lengths

``settings`` trains the same number of updates synchronously, one step ahead on the same devices and on servers, and
fully asynchronously, in turn, and prints medians: the first two have two workers, the others a trainer and a server.
``lengths`` compares the responses that a fully asynchronous run has generated with those that it has trained on, if it
keeps the bound by waiting and by dropping. The last line printed is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

from agent_loops import WARMUP_STEPS, per_step_cpu, train
from long_tail import LIMIT, write_inputs

from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.ledger import LedgerReader

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
CORES = 2
PROMPTS = 8
ROLLOUT = "actor_rollout_ref.rollout"
SERVERS = {
    "actor_rollout_ref.hybrid_engine": "false",
    "trainer.n_gpus_per_node": 1,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 1,
}
FULLY = SERVERS | {
    "async_training.mode": "fully_async",
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.staleness_threshold": 1.0,
    "async_training.max_off_policy_threshold": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocate_async": {"async_training.mode": "colocate_async", "async_training.trigger_parameter_sync_step": 1},
    "one_step_off": SERVERS | {"async_training.mode": "one_step_off"},
    "fully_async": FULLY,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "wait": FULLY,
    "drop": FULLY | {"async_training.off_policy_strategy": "drop", "async_training.staleness_threshold": 4.0},
}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("settings", "lengths"))
    parser.add_argument("--only", nargs="+", choices=(*SETTINGS, *STRATEGIES), help="run only these")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting (default: 3)")
    parser.add_argument("--steps", type=int, default=22, help=f"updates, {WARMUP_STEPS} not timed (default: 22)")
    parser.add_argument("--out", type=Path, help="folder for logs and inputs (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="further keys, for instance key=value")
    return parser.parse_intermixed_args()


def run_in(folder: Path, name: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train in a folder of a name; return what was measured."""
    common = {
        "custom_reward_function.path": HERE / "long_tail.py",
        "data.train_files": folder / "inputs" / "prompts.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 32,
        "data.max_response_length": LIMIT,
        "actor_rollout_ref.model.path": folder / "inputs" / "model",
        "actor_rollout_ref.model.external_lib": "long_tail",
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        f"{ROLLOUT}.mode": "async",
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.agent.num_workers": 2,
        f"{ROLLOUT}.agent.default_agent_loop": "long_tail",
        "ray_kwargs.ray_init.num_cpus": 6,
        "trainer.n_gpus_per_node": CORES,
        "trainer.report": "false",
    }
    return train(folder / name, common | settings, args.overrides, args.steps)


def settings_table(folder: Path, args: argparse.Namespace) -> tuple[list[str], Any]:
    """Run the settings in turn; return a table of medians, and all figures."""
    chosen = args.only or list(SETTINGS)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for number in range(args.rounds):
        for name in chosen:
            measured = run_in(folder, f"{name}_{number}", SETTINGS[name], args)
            wall = measured["marks"][-1][0] - measured["marks"][WARMUP_STEPS - 1][0]
            cpu = sum(per_step_cpu(measured).values()) * (args.steps - WARMUP_STEPS)
            found[name].append((wall, cpu / wall / CORES))
    medians = {name: [statistics.median(each) for each in zip(*runs, strict=True)] for name, runs in found.items()}
    first = medians[chosen[0]][0]
    lines = [
        f"| setting | seconds of {args.steps - WARMUP_STEPS} updates | times faster | cores in use |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {wall:.1f} | {first / wall:.2f} | {busy:.0%} |" for name, (wall, busy) in medians.items()]
    return lines, found


def lengths_table(folder: Path, args: argparse.Namespace) -> tuple[list[str], Any]:
    """Run the strategies; return a table of the lengths that each has generated and trained, and all figures."""
    lines = ["| strategy | generated: responses, mean | trained: responses, mean | distance |", "|---|---|---|---|"]
    found = {}
    for name in args.only or STRATEGIES:
        run_in(folder, name, STRATEGIES[name], args)
        generated, trained = lengths_of(folder / name / "ledger.sqlite")
        found[name] = {"generated": generated, "trained": trained, "distance": distance(generated, trained)}
        means = [f"{len(each)}, {statistics.mean(each):.1f}" for each in (generated, trained)]
        lines.append(f"| {name} | {' | '.join(means)} | {found[name]['distance']:.2f} |")
    return lines, found


def lengths_of(path: Path) -> tuple[list[int], list[int]]:
    """Return the lengths of the responses that a ledger has, and of those among them that updates have trained."""
    with LedgerReader(path) as reader:
        audit = Audit.of(reader.events())
    trained = [audit.lengths[number] for numbers in audit.updates.values() for number in numbers]
    return sum(audit.lengths.values(), []), sum(trained, [])


def distance(one: list[int], other: list[int]) -> float:
    """Return the Wasserstein distance of two samples: the area between their distribution functions."""
    places = sorted({*one, *other})
    shares = [
        [bisect_right(sample, place) / len(sample) for place in places] for sample in (sorted(one), sorted(other))
    ]
    gaps = [abs(a - b) for a, b in zip(*shares, strict=True)]
    return sum(gap * (after - place) for gap, place, after in zip(gaps, places, places[1:], strict=False))


def main() -> None:
    """Measure and print."""
    args = parse_args()
    folder = args.out or Path(tempfile.mkdtemp())
    write_inputs(folder / "inputs", PROMPTS * 64)
    lines, found = (settings_table if args.what == "settings" else lengths_table)(folder, args)
    sys.stdout.write("\n".join([*lines, json.dumps(found)]) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
