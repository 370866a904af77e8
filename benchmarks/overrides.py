"""Measure what overrides change in a run of an example: tokens and CPU seconds of a step, without and with them.

python benchmarks/overrides.py examples/grpo_trainer/run_tiny_cpu.sh actor_rollout_ref.model.use_prefix_sharing=true

The script gets its folder as ``OUT_DIR``, and what it prepares there (data, a supervised model) is kept between runs.
CPU seconds are those of all processes, from the end of the first step to the end of the last. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from process_tree import run_measured

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800.0
TRAINED = "perf/total_num_tokens"
COMPUTED = "perf/computed_tokens/"
QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.resume_mode=disable")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="an example that ends with overrides of its training")
    parser.add_argument("overrides", nargs="+", help="key=value, what is measured")
    parser.add_argument("--always", nargs="*", default=[], help="overrides of all runs")
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first not counted (default: 4)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turn (default: 1)")
    parser.add_argument("--folder", default="grpo", help="of the training, in OUT_DIR; . if it is that (default: grpo)")
    parser.add_argument("--out", type=Path, help="OUT_DIR of the script (default: a temporary one)")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be above 1, the step that is not counted")
    return args


def measure(args: argparse.Namespace, out: Path, overrides: list[str]) -> dict[str, Any]:
    """Run the example once and return its figures per counted step."""
    folder = out / args.folder
    shutil.rmtree(folder, ignore_errors=True)
    given = [*QUIET, f"trainer.total_training_steps={args.steps}", *args.always, *overrides]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"OUT_DIR": str(out), "STEPS": str(args.steps), "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    progress = folder / "metrics.jsonl"
    result = run_measured(["bash", str(args.script), *given], env, progress, out.parent / "output.log", TIMEOUT_S)
    marks = result["marks"][: args.steps]
    counted = [json.loads(line)["data"] for line in progress.read_text(encoding="utf-8").splitlines()][1 : args.steps]
    if len(marks) < args.steps:
        raise RuntimeError(f"{len(marks)} steps were seen, not {args.steps}; see {out.parent}/output.log")
    (start, before), (end, after) = marks[0], marks[-1]
    phases = sorted({key for line in counted for key in line if key.startswith(COMPUTED)})
    return {
        "overrides": overrides,
        "cpu_s": (sum(after.values()) - sum(before.values())) / len(counted),
        "wall_s": (end - start) / len(counted),
        "update_s": statistics.fmean(line["timing_s/update_actor"] for line in counted),
        "trained": statistics.fmean(line[TRAINED] for line in counted),
        "computed": {key.removeprefix(COMPUTED): statistics.fmean(line[key] for line in counted) for key in phases},
        "rewards": [round(line["critic/score/mean"], 4) for line in counted],
        "peak_pss_gb": result["peak_pss"] / 1e9,
    }


def main() -> None:
    """Run the example and print a row of a table."""
    args = parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_")) / "run"
    out.mkdir(parents=True, exist_ok=True)
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(args.rounds):
        for given in (False, True) if number % 2 == 0 else (True, False):
            runs[given].append(measure(args, out, args.overrides if given else []))
    plain, changed = (
        {key: statistics.median(run[key] for run in runs[given]) for key in ("cpu_s", "wall_s", "update_s", "trained")}
        for given in (False, True)
    )
    computed = min(runs[True][0]["computed"].values(), default=changed["trained"])
    cells = [args.script.name, f"{computed / changed['trained']:.2f}"]
    for key in ("cpu_s", "update_s"):
        cells += [f"{plain[key]:.2f}", f"{changed[key]:.2f}", f"{changed[key] / plain[key]:.2f}"]
    sys.stdout.write("| script | tokens | CPU s | with | ratio | update, s | with | ratio |\n" + "|---" * 8 + "|\n")
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.write(json.dumps({"script": str(args.script), "runs": runs[False] + runs[True]}) + "\n")


if __name__ == "__main__":
    main()
