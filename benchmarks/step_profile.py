"""Attribute the CPU seconds of a training step to processes and subjects, in a run of a case of ``trl.py``.

python benchmarks/step_profile.py --py-spy path/to/py-spy --case fixed --steps 40 [key=value ...]

The kernel counts the CPU seconds of every thread, while py-spy samples the stacks of the Python threads. The seconds of
a thread are split among the subjects by the share of its samples with that subject on the stack. C++ threads and
daemons have the name of the thread as subject. The first steps are not counted.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from countdown import make_inputs
from process_tree import ProcessTree, role
from trl import CASES, ROOT, verl_command

SKIPPED_STEPS = 3
WATCHED_S = 0.02
"""CPU seconds per step above which py-spy samples a process; py-spy itself costs CPU."""
ATTACH_S = 5.0
RUN_TIMEOUT_S = 3600.0
TICKS_PER_S = 100.0  # unit of the CPU counters in /proc

SUBJECTS = [
    ("update: backward", r"_engine_run_backward"),
    ("update: optimizer", r"(update_actor|update_policy).*(optimizer_step|/torch/optim/|clip_grad|zero_grad)"),
    ("update: micro-batches, packing", r"update_actor.*(engine/passes\.py|utils/batch/|padding)"),
    ("update: loss", r"update_actor.*(/verl/algos/|roles/losses\.py)"),
    ("update: forward, attention", r"update_actor.*(forest_attention|models/transformers/attention)\.py"),
    ("update: forward", r"update_actor.*(engine/fsdp/forward\.py|/transformers/models/)"),
    ("update: other", r"update_actor"),
    ("weight sync", r"weight_sync\.py|checksum|begin_update|finish_update"),
    ("generation: sampling", r"/vllm/v1/sample/|_sample \([^)]*/vllm/"),
    ("generation: model", r"/vllm/model_executor/models/"),
    ("generation: steps of the engine", r"/vllm/v1/"),
    ("generation: other", r"generate_sequences|/vllm/|/rollout/"),
    ("rewards", r"/rewards/|compute_score"),
    ("advantages, shaping", r"/verl/algos/"),
    ("metrics, record", r"utils/observe|utils/report|metric|tracking|/display"),
    ("data", r"dataloader|dataset"),
    ("messages of Ray", r"single_controller|/ray/|serializ|pickle"),
    ("trainer: other", r"/verl/trainer/"),
]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--py-spy", required=True, help="the program")
    parser.add_argument("--case", choices=CASES, default="fixed")
    parser.add_argument("--steps", type=int, default=40, help="number of counted steps (default: 40)")
    parser.add_argument("--rate", type=int, default=100, help="samples per second (default: 100)")
    parser.add_argument(
        "--least", type=float, default=0.005, help="CPU seconds per step below which rows are summed up as rest"
    )
    parser.add_argument("--out", type=Path, help="folder for logs and stacks (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="further keys, for instance key=value")
    return parser.parse_args()


def counters(processes: list[psutil.Process]) -> dict[tuple[int, int], tuple[str, float]]:
    """Return the name and the CPU seconds of each thread of a process."""
    found = {}
    for process in processes:
        for folder in Path(f"/proc/{process.pid}/task").glob("*"):
            with suppress(OSError, IndexError):
                text = (folder / "stat").read_text(encoding="utf-8")
                name = text[text.index("(") + 1 : text.rindex(")")]
                fields = text[text.rindex(")") + 2 :].split()
                found[process.pid, int(folder.name)] = (name, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return found


def subject_of(stack: str) -> str:
    """Return the subject of a stack: the first that a frame matches, from the outermost frame to the innermost."""
    return next((subject for subject, pattern in SUBJECTS if re.search(pattern, stack)), "other Python")


def samples_of(path: Path) -> dict[int, Counter[str]]:
    """Count the samples of a py-spy recording by thread and subject."""
    found: dict[int, Counter[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        stack, _, count = line.rpartition(" ")
        if match := re.match(r"thread \((\d+)\)", stack):
            found.setdefault(int(match[1]), Counter())[subject_of(stack)] += int(count)
    return found


class Recording:
    """A recording of a run: py-spy on each of its Python processes, and the CPU counters of all threads."""

    def __init__(
        self, program: str, rate: int, processes: list[psutil.Process], watched: list[psutil.Process], folder: Path
    ) -> None:
        self.processes = processes
        self.folder = folder
        self.spies = []
        for process in watched:
            options = ["--threads", "--nonblocking", "--full-filenames", "--format", "raw", "-d", "100000"]
            target = ["-p", str(process.pid), "-r", str(rate), "-o", str(folder / f"{process.pid}.raw")]
            command = [program, "record", *options, *target]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.spies.append(subprocess.Popen(command, **quiet))
        self.names = {}
        for process in processes:
            with suppress(psutil.Error):
                self.names[process.pid] = role(process)

    def start(self) -> None:
        """Read the CPU counters; CPU seconds count from here."""
        self.before = counters(self.processes)

    def stop(self) -> list[dict[str, Any]]:
        """End the recording and return the CPU seconds by process and subject."""
        after = counters(self.processes)
        for spy in self.spies:
            spy.send_signal(signal.SIGINT)
        for spy in self.spies:
            spy.wait(timeout=120)
        samples = {pid: samples_of(self.folder / f"{pid}.raw") for pid, _ in after}
        used: dict[tuple[str, str], list[float]] = {}
        for (pid, thread), (name, seconds) in after.items():
            spent = seconds - self.before.get((pid, thread), (name, 0.0))[1]
            seen = samples[pid].get(thread)
            # A C++ thread has no samples, and an idle thread has only samples of waiting.
            parts = seen if seen else Counter({f"thread {re.sub(r'[0-9]+$', '', name)}": 0})
            total = sum(parts.values())
            for subject, count in parts.items():
                row = used.setdefault((self.names.get(pid, "?"), subject), [0.0, 0])
                row[0] += spent * (count / total if total else 1)
                row[1] += count if spent else 0
        rows = [{"process": key[0], "subject": key[1], "cpu_s": row[0], "samples": row[1]} for key, row in used.items()]
        return sorted(rows, key=lambda row: -row["cpu_s"])


def used_by(tree: ProcessTree) -> dict[psutil.Process, float]:
    """Return the CPU seconds so far of each process."""
    found = {}
    for process in tree.alive():
        with suppress(psutil.Error):
            found[process] = sum(process.cpu_times()[:2])
    return found


def lines_of(path: Path) -> int:
    """Return the number of finished steps of a run."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def record(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run ``verl`` and return the CPU seconds per step by process and subject."""
    # Two more steps keep the processes alive until the last counted step ends.
    steps = args.steps + SKIPPED_STEPS + 2
    defaults = {"hidden": 256, "layers": 4, "vocab": 1000, "prompts": 16, "samples": 8, "seed": 1}
    sizes = SimpleNamespace(**CASES[args.case]._asdict(), **defaults, steps=steps)
    sizes.overrides = args.overrides
    make_inputs(folder / args.case, sizes, steps)
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    progress = run / "metrics.jsonl"
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (run / "output.log").open("w", encoding="utf-8") as log:
        command = verl_command(sizes, folder / args.case, run)
        child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        tree = ProcessTree(child.pid)
        try:
            wait_for(SKIPPED_STEPS - 1, progress, child, tree)
            before = used_by(tree)
            wait_for(SKIPPED_STEPS, progress, child, tree)
            spent = {process: seconds - before.get(process, 0.0) for process, seconds in used_by(tree).items()}
            watched = [process for process, seconds in spent.items() if seconds >= WATCHED_S]
            recording = Recording(args.py_spy, args.rate, list(spent), watched, run)
            time.sleep(ATTACH_S)
            first = lines_of(progress) + 1
            wait_for(first, progress, child, tree)
            recording.start()
            last = steps - 1
            wait_for(last, progress, child, tree)
            rows = recording.stop()
            child.wait(timeout=300)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(timeout=60)
    return [row | {"cpu_s": row["cpu_s"] / (last - first)} for row in rows]


def wait_for(steps: int, progress: Path, child: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    """Wait until the given number of steps have ended, and register all processes that appear until then."""
    until = time.monotonic() + RUN_TIMEOUT_S
    while lines_of(progress) < steps:
        if child.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{lines_of(progress)} of {steps} steps; see {progress.parent}/output.log")
        for _ in tree.alive():
            pass
        time.sleep(0.1)


def table(rows: list[dict[str, Any]], least: float) -> list[str]:
    """Return a Markdown table of the processes, largest first, and their subjects."""
    lines = ["| process | subject | CPU s a step | samples |", "|---|---|---|---|"]
    by_process: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_process.setdefault(row["process"], []).append(row)
    for process in sorted(by_process, key=lambda name: -sum(row["cpu_s"] for row in by_process[name])):
        own = by_process[process]
        seen = sum(row["samples"] for row in own)
        lines.append(f"| **{process}** | all | **{sum(row['cpu_s'] for row in own):.3f}** | {seen} |")
        shown = [row for row in own if row["cpu_s"] >= least]
        lines += [f"| | {row['subject']} | {row['cpu_s']:.3f} | {row['samples'] or '-'} |" for row in shown]
        rest = sum(row["cpu_s"] for row in own if row["cpu_s"] < least)
        if shown and rest >= least / 10:
            lines.append(f"| | rest | {rest:.3f} | |")
    lines.append(f"| **all** | | **{sum(row['cpu_s'] for row in rows):.3f}** | |")
    return lines


def main() -> None:
    """Record and print the table and a JSON line."""
    args = parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = record(args, folder)
    sys.stdout.write("\n".join([f"stacks, logs: {folder}", "", *table(rows, args.least), ""]) + "\n")
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
