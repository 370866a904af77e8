"""Measure agent loops on CPU: the cost of ``rollout.mode=async`` over ``sync``, and many concurrent trajectories.

python benchmarks/agent_loops.py overhead
python benchmarks/agent_loops.py concurrent

``overhead`` alternates single-turn GRPO in both modes, on the inputs of the case ``fixed`` of trl.py. It compares the
median times of the steps after the warm-up and the CPU seconds of all processes. ``concurrent`` runs steps with many
concurrent trajectories of ``tool_agent``, whose tool sleeps for 1 to 5 seconds. It records memory, CPU and the outcome
of every attempt at a trajectory. The last line printed is JSON.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from countdown import make_inputs
from process_tree import run_measured

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 2
RUN_TIMEOUT_S = 1800.0
MODES = ("sync", "async")
TARGETS = {"timing_s/step": 1.1, "timing_s/gen": 1.3}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "concurrent"))
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode, in turn (overhead; default: 1)")
    parser.add_argument("--steps", type=int, help=f"per run, {WARMUP_STEPS} not counted (default: 22; concurrent: 6)")
    parser.add_argument("--trajectories", type=int, default=1000, help="at once (concurrent; default: 1000)")
    parser.add_argument("--turns", type=int, default=3, help="of the model in a trajectory (concurrent; default: 3)")
    parser.add_argument("--tool-s", type=float, nargs=2, default=(1.0, 5.0), help="least and most seconds of a tool")
    parser.add_argument("--workers", type=int, default=1, help="actors that run the loops (default: 1)")
    parser.add_argument("--out", type=Path, help="folder for logs and inputs (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="further keys, for instance key=value")
    args = parser.parse_intermixed_args()  # allows overrides after options
    args.steps = args.steps or (22 if args.what == "overhead" else 6)
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be above {WARMUP_STEPS}, the steps that are not counted")
    return args


def train(run: Path, settings: dict[str, Any], overrides: list[str], steps: int) -> dict[str, Any]:
    """Train in the folder ``run``; return the measurements and the metrics of each step."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    common = {
        "algorithm.adv_estimator": "grpo",
        "data.val_files": "null",
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.use_remove_padding": "true",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.enforce_eager": "true",
        "actor_rollout_ref.rollout.calculate_log_probs": "true",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[]",
        "trainer.default_local_dir": run,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 1000,
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
    }
    pairs = [f"{key}={value}" for key, value in (common | settings).items()]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *pairs, *overrides]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = f"{ROOT}:{HERE}"
    measured = run_measured(command, env, run / "metrics.jsonl", run / "output.log", RUN_TIMEOUT_S)
    lines = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(measured["marks"]) != steps:
        raise RuntimeError(f"{len(measured['marks'])} steps were seen, not {steps}; see {run}/output.log")
    return measured | {"lines": lines}


def per_step_cpu(measured: dict[str, Any]) -> dict[str, float]:
    """Return the CPU seconds per counted step for each process."""
    marks = measured["marks"]
    (_, before), (_, after) = marks[WARMUP_STEPS - 1], marks[-1]
    return {name: (value - before.get(name, 0.0)) / (len(marks) - WARMUP_STEPS) for name, value in after.items()}


# ---- overhead


def overhead(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run the modes alternately, and return the figures of each run."""
    sizes = SimpleNamespace(
        hidden=256, layers=4, vocab=1000, prompts=16, samples=8, prompt_length=32, shortest=34, longest=40, limit=32,
        seed=1,
    )  # fmt: skip
    make_inputs(folder / "inputs", sizes, args.steps)
    settings = {
        "data.train_files": folder / "inputs" / "prompts.parquet",
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": sizes.prompt_length,
        "data.max_response_length": sizes.limit,
        "actor_rollout_ref.model.path": folder / "inputs" / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": sizes.prompts,
        "actor_rollout_ref.rollout.n": sizes.samples,
        "actor_rollout_ref.rollout.agent.num_workers": args.workers,
        "custom_reward_function.path": HERE / "countdown.py",
    }
    results = []
    for number in range(args.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            mine = settings | {"actor_rollout_ref.rollout.mode": mode}
            measured = train(folder / f"{mode}_{number}", mine, args.overrides, args.steps)
            counted = measured["lines"][WARMUP_STEPS:]
            row = {"mode": mode, "round": number, "cpu_s": sum(per_step_cpu(measured).values())}
            row |= {key: statistics.median(line[key] for line in counted) for key in TARGETS}
            row["cpu_s_by_process"] = {k: round(v, 3) for k, v in per_step_cpu(measured).items() if v >= 0.005}
            results.append(row)
            say(f"{number} {mode}: " + ", ".join(f"{key} {row[key]:.3f}" for key in (*TARGETS, "cpu_s")))
    return results


def overhead_table(results: list[dict[str, Any]]) -> list[str]:
    """Return the medians over the runs, and the ratios of the modes, as lines of Markdown."""
    keys = (*TARGETS, "cpu_s")
    lines = ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    medians: dict[str, dict[str, float]] = {}
    for mode in MODES:
        rows = [row for row in results if row["mode"] == mode]
        medians[mode] = {key: statistics.median(row[key] for row in rows) for key in keys}
        lines.append(f"| {mode} | " + " | ".join(f"{medians[mode][key]:.3f}" for key in keys) + " |")
    ratios = {key: medians["async"][key] / medians["sync"][key] for key in keys}
    limits = {key: f" (target: at most {limit})" for key, limit in TARGETS.items()}
    lines.append("| async / sync | " + " | ".join(f"{ratios[key]:.2f}{limits.get(key, '')}" for key in keys) + " |")
    return lines


# ---- many trajectories at once


def concurrent(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run steps whose trajectories are all concurrent, and return the figures of the run."""
    sys.path.insert(0, str(ROOT))
    import pandas

    from examples.tiny_model import make_tiny_model

    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    make_tiny_model(str(inputs / "model"))
    draw = random.Random(0)
    rows = [
        {
            "data_source": "sleepers",
            "prompt": [{"role": "user", "content": f"{draw.randrange(10**6):06d}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for _ in range(args.trajectories)
    ]
    pandas.DataFrame(rows).to_parquet(inputs / "prompts.parquet")
    tools = inputs / "tools.yaml"
    least_s, most_s = args.tool_s
    config = f"{{type: native, least_s: {least_s}, most_s: {most_s}}}"
    tools.write_text(f"tools:\n  - class_name: sleepers.SleepTool\n    config: {config}\n", encoding="utf-8")
    settings = {
        "data.train_files": inputs / "prompts.parquet",
        "data.train_batch_size": args.trajectories,
        "data.max_prompt_length": 32,
        "data.max_response_length": 128,
        "actor_rollout_ref.model.path": inputs / "model",
        "actor_rollout_ref.model.external_lib": "sleepers",
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.trajectories,
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.rollout.agent.num_workers": args.workers,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "sleepers",
        "actor_rollout_ref.rollout.multi_turn.enable": "true",
        "actor_rollout_ref.rollout.multi_turn.format": "sleepers",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": args.turns,
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": tools,
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "disable",
        "custom_reward_function.path": HERE / "countdown.py",
    }
    run = folder / "run"
    measured = train(run, settings, args.overrides, args.steps)
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text(encoding="utf-8").splitlines()]
    outcomes = Counter(line["outcome"] for line in attempts)
    counted = measured["lines"][WARMUP_STEPS:]
    seconds = statistics.median(line["timing_s/step"] for line in counted)
    cpu = per_step_cpu(measured)
    gens = [line["timing_s/gen"] for line in counted]
    return {
        "trajectories": args.trajectories,
        "steps": args.steps,
        "attempts": dict(outcomes),
        "lost": args.steps * args.trajectories - outcomes["ok"],
        "step_s": seconds,
        "gen_s": statistics.median(gens),
        "turns": statistics.fmean(line["num_turns/mean"] for line in counted),
        "tool_calls": statistics.fmean(line["tool_calls/count"] for line in counted),
        "cpu_share": {name: round(value / seconds, 3) for name, value in cpu.items() if value / seconds >= 0.005},
        "pss_gb_after_step": [round(sum(pss.values()) / 1e9, 3) for pss in measured["pss_at_marks"]],
        "pss_mb_by_process": pss_by_process(measured["pss_at_marks"]),
        "peak_pss_gb": measured["peak_pss"] / 1e9,
    }


def pss_by_process(marks: list[dict[str, int]]) -> dict[str, list[int]]:
    """Return the memory in MB after each step, for processes that change by 1 MB or more after the warm-up."""
    names = sorted({name for mark in marks for name in mark})
    rows = {name: [round(mark.get(name, 0) / 1e6) for mark in marks] for name in names}
    return {name: row for name, row in rows.items() if max(row[WARMUP_STEPS:]) - min(row[WARMUP_STEPS:]) >= 1}


def concurrent_table(row: dict[str, Any]) -> list[str]:
    """Return the figures as lines of Markdown."""
    return ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in row.items())]


def say(line: str) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, print the table and the JSON line."""
    args = parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_"))
    say(f"inputs, logs: {folder}")
    if args.what == "overhead":
        results: Any = overhead(args, folder)
        table = overhead_table(results)
    else:
        results = concurrent(args, folder)
        table = concurrent_table(results)
    sys.stdout.write("\n".join(["", *table, ""]) + "\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
