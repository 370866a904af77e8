"""Compare ``verl`` and TRL on CPU: wall and CPU seconds per step of GRPO, and peak memory, over the process tree.

python benchmarks/trl.py --trl-python path/to/venv/bin/python

The frameworks run alternately. Both train the same model on the same prompts with the same settings, from a checkpoint
per case that this script makes (see countdown.py). In the case ``fixed`` every response has 32 tokens; in ``varied``
lengths are uniform from 4 to 64; in ``long_prompt`` prompts have 512 tokens and responses 64. ``--trl-python`` is an
interpreter that can import trl; without it only ``verl`` runs. The last line printed is JSON.

TRL generates with transformers, with 32 rows in a forward pass. With 8 or 128 rows it took about as many CPU seconds
or more (docs/perf/cpu_vs_trl.md). To try others:

    --only trl --trl-micro 8 32 128
    --only trl --trl-options use_transformers_continuous_batching=true

Each size is a row of the table, and the ratio is taken to the fastest.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from countdown import make_inputs
from process_tree import run_measured

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 2
RUN_TIMEOUT_S = 1200.0


class Case(NamedTuple):
    """Lengths of responses and prompts; lengths above the limit are cut off at the limit.

    ``trl_micro`` is the number of rows in a forward pass of TRL, ``token_budget`` the number of tokens in a forward
    pass of verl (docs/perf/cpu_vs_trl.md).
    """

    shortest: int
    longest: int
    limit: int
    prompt_length: int = 32
    trl_micro: int = 32
    token_budget: int = 640


CASES = {
    "fixed": Case(34, 40, 32),
    "varied": Case(4, 64, 64),
    "long_prompt": Case(66, 72, 64, prompt_length=512, token_budget=2048),
}
LENGTH_KEYS = {  # by framework
    "verl": ("response_length/mean", "response_length/min", "response_length/max"),
    "trl": ("completions/mean_length", "completions/min_length", "completions/max_length"),
}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with trl (default: run verl alone)")
    parser.add_argument("--only", choices=("verl", "trl"), help="run only this framework")
    parser.add_argument("--case", choices=(*CASES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help=f"per run, {WARMUP_STEPS} not counted (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads per process (default: 1)")
    parser.add_argument("--trl-micro", type=int, nargs="+", help="rows per forward pass of TRL (default: by case)")
    parser.add_argument("--trl-options", nargs="+", default=[], help="key=value in JSON, arguments of its GRPOConfig")
    parser.add_argument("--token-budget", type=int, help="tokens per forward pass of verl (default: by case)")
    for name, value in (("hidden", 256), ("layers", 4), ("vocab", 1000), ("prompts", 16), ("samples", 8)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--prompt-length", type=int, help="default: that of the case")
    parser.add_argument("--seed", type=int, default=1, help="of model, prompts and sampling (default: 1)")
    parser.add_argument("--out", type=Path, help="folder for logs and inputs (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="further keys for verl, for instance key=value")
    args = parser.parse_args()
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be above {WARMUP_STEPS}, the steps that are not counted")
    if args.only == "trl" and not args.trl_python:
        parser.error("--only trl needs --trl-python")
    return args


def verl_command(args: SimpleNamespace, inputs: Path, run: Path) -> list[str]:
    """Return the command that trains with verl."""
    rows = args.prompts
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": inputs / "prompts.parquet",
        "data.val_files": "null",
        "data.train_batch_size": rows,
        "data.max_prompt_length": args.prompt_length,
        "data.max_response_length": args.limit,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": inputs / "model",
        "actor_rollout_ref.model.use_remove_padding": "true",
        "actor_rollout_ref.model.use_prefix_sharing": "true",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.ppo_mini_batch_size": rows,
        "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": args.token_budget,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": args.samples,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "custom_reward_function.path": HERE / "countdown.py",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[]",
        "trainer.seed": args.seed,
        "trainer.default_local_dir": run,
        "trainer.total_training_steps": args.steps,
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
    }
    pairs = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *pairs, *args.overrides]


def trl_command(args: SimpleNamespace, inputs: Path, run: Path, micro: int) -> list[str]:
    """Return the command that trains with TRL; ``-P`` keeps this folder off sys.path, since it has a trl.py."""
    options = {
        "inputs": inputs, "progress": run / "metrics.jsonl", "steps": args.steps, "prompts": args.prompts,
        "samples": args.samples, "limit": args.limit, "micro": micro, "threads": args.threads, "seed": args.seed,
    }  # fmt: skip
    pairs = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [args.trl_python, "-P", str(HERE / "trl_side.py"), *pairs, *args.trl_options]


def measure(name: str, args: SimpleNamespace, inputs: Path, run: Path) -> dict[str, Any]:
    """Run ``verl``, or ``trl`` with a number of rows per pass, once; return its figures per counted step."""
    framework, _, micro = name.partition(" ")
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    command = trl_command(args, inputs, run, int(micro)) if micro else verl_command(args, inputs, run)
    threads = str(args.threads)
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    result = run_measured(command, env, run / "metrics.jsonl", run / "output.log", RUN_TIMEOUT_S)
    marks = result["marks"]
    if len(marks) != args.steps:
        raise RuntimeError(f"{name}: {len(marks)} steps were seen, not {args.steps}; see {run}/output.log")
    (start, cpu_start), (end, cpu_end) = marks[WARMUP_STEPS - 1], marks[-1]
    counted = args.steps - WARMUP_STEPS
    by_process = {name: (value - cpu_start.get(name, 0.0)) / counted for name, value in cpu_end.items()}
    lines = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    mean, low, high = ([line[key] for line in lines[WARMUP_STEPS:]] for key in LENGTH_KEYS[framework])
    return {
        "framework": name,
        "cpu_s": sum(by_process.values()),
        "wall_s": (end - start) / counted,
        "first_step_s": marks[0][0],
        "peak_rss_gb": result["peak_rss"] / 1e9,
        "peak_pss_gb": result["peak_pss"] / 1e9,
        "length": [statistics.fmean(mean), min(low), max(high)],
        "cpu_s_by_process": {name: round(value, 3) for name, value in by_process.items() if value >= 0.005},
        "start_cpu_s_by_process": {name: round(value, 2) for name, value in marks[0][1].items()},
        "pss_mb_by_process": {name: round(value / 1e6) for name, value in result["pss_at_marks"][-1].items()},
    }


def compare(case: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run both frameworks alternately on the inputs of a case, and return the figures of each run."""
    lengths = CASES[case]._asdict()
    given = {name: getattr(args, name) for name in ("prompt_length", "token_budget")}
    lengths |= {name: value for name, value in given.items() if value is not None}
    sizes = SimpleNamespace(**{**vars(args), **lengths})
    inputs = folder / case
    make_inputs(inputs, sizes, args.steps)
    names = [] if args.only == "trl" else ["verl"]
    if args.trl_python and args.only != "verl":
        names += [f"trl {micro}" for micro in args.trl_micro or [CASES[case].trl_micro]]
    results = []
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            row = {"case": case, "round": number} | measure(
                name, sizes, inputs, folder / f"{case}_{name.replace(' ', '_')}_{number}"
            )
            results.append(row)
            with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            say(f"{case} {number} {name}: {row['cpu_s']:.2f} CPU s, {row['wall_s']:.2f} s per step")
    return results


COLUMNS = {
    "cpu_s": "CPU s/step",
    "wall_s": "wall s/step",
    "first_step_s": "start, s",
    "peak_rss_gb": "peak RSS GB",
    "peak_pss_gb": "peak PSS GB",
}


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return the medians with their ranges, and the ratios, as lines of Markdown."""
    lines = ["| case | | " + " | ".join(COLUMNS.values()) + " | response tokens: mean, min, max |"]
    lines.append("|---" * (len(COLUMNS) + 3) + "|")
    for case in dict.fromkeys(row["case"] for row in results):
        medians: dict[str, dict[str, float]] = {}
        of_case = [row for row in results if row["case"] == case]
        for name in dict.fromkeys(
            row["framework"] for row in sorted(of_case, key=lambda row: row["framework"] != "verl")
        ):
            rows = [row for row in of_case if row["framework"] == name]
            medians[name] = {key: statistics.median(row[key] for row in rows) for key in COLUMNS}
            cells = [
                f"{medians[name][key]:.2f} ({min(row[key] for row in rows):.2f} to {max(row[key] for row in rows):.2f})"
                for key in COLUMNS
            ]
            mean = statistics.fmean(row["length"][0] for row in rows)
            low = min(row["length"][1] for row in rows)
            high = max(row["length"][2] for row in rows)
            lines.append(f"| {case} | {name} | {' | '.join(cells)} | {mean:.1f}, {low:.0f}, {high:.0f} |")
        if "verl" in medians and len(medians) > 1:
            best = min((name for name in medians if name != "verl"), key=lambda name: medians[name]["cpu_s"])
            ratios = [f"{medians['verl'][key] / medians[best][key]:.2f}" for key in COLUMNS]
            lines.append(f"| {case} | verl / {best} | {' | '.join(ratios)} | |")
    return lines


def say(line: str) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the comparison, print the table and the JSON line."""
    args = parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_"))
    results = [row for case in (CASES if args.case == "all" else [args.case]) for row in compare(case, args, folder)]
    sys.stdout.write("\n".join([f"inputs, logs: {folder}", "", *table(results), ""]) + "\n")
    sizes = {name: getattr(args, name) for name in ("hidden", "layers", "vocab", "prompts", "samples")}
    settings = sizes | {name: getattr(args, name) for name in ("steps", "threads", "trl_options", "token_budget")}
    sys.stdout.write(json.dumps({"settings": settings, "results": results}) + "\n")


if __name__ == "__main__":
    main()
