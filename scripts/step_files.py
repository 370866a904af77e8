"""List the files of ``verl/`` in which a function runs during one step of training, in the driver and its workers.

The run is the quick start's GRPO, on a base model with random weights:

    python scripts/step_files.py                   # of this checkout
    python scripts/step_files.py --tree ../before  # of another one
    python scripts/step_files.py --lines           # with the lines of each file

The step lasts from the driver's call of ``prepare`` for the second batch to the call for the third, so it includes the
weight sync after its update. Each Python process of the run writes down the files in which it calls a function, and
when.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = 2
RECORDER = """
import os, sys, threading, time

out = open(os.path.join(os.environ["STEP_FILES_OUT"], f"{os.getpid()}.txt"), "a", buffering=1)
tree = os.environ["STEP_FILES_TREE"]
last = {}

def record(frame, event, argument):
    if event != "call":
        return
    path = frame.f_code.co_filename
    if not path.startswith(tree):
        return
    now = time.monotonic()
    if frame.f_code.co_name == "prepare" and path.endswith("trainer/ppo/ray_trainer.py"):
        out.write(f"{now} prepare\\n")
    if now - last.get(path, 0) > 0.05:
        last[path] = now
        out.write(f"{now} {path}\\n")

def begin_again():
    global out
    out = open(os.path.join(os.environ["STEP_FILES_OUT"], f"{os.getpid()}.txt"), "a", buffering=1)

os.register_at_fork(after_in_child=begin_again)
threading.setprofile(record)
sys.setprofile(record)
"""
"""A ``sitecustomize`` module: Python imports it at the start of every process that inherits the environment."""


def make_inputs(out: Path, tree: Path) -> None:
    """Write the quick start's data and base model."""
    run(tree, "examples/data_preprocess/gsm8k.py", "--source", "synthetic", "--local_save_dir", str(out / "data"))
    run(tree, "examples/tiny_model.py", "--save-dir", str(out / "base"))


def run(tree: Path, *command: str) -> None:
    """Run a Python script of a checkout."""
    subprocess.run([sys.executable, *command], cwd=tree, check=True, env={**os.environ, "PYTHONPATH": str(tree)})


def train(out: Path, tree: Path, overrides: list[str]) -> None:
    """Run three training steps with a recorder in each process."""
    recorder = out / "recorder"
    recorder.mkdir()
    (recorder / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
    records = out / "records"
    records.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{recorder}:{tree}",
        "STEP_FILES_OUT": str(records),
        "STEP_FILES_TREE": f"{tree}/verl/",
        "DATA_DIR": str(out / "data"),
        "MODEL_PATH": str(out / "base"),
        "OUT_DIR": str(out / "run"),
        "WORKERS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    steps = f"trainer.total_training_steps={STEP + 1}"
    command = ["bash", "examples/grpo_trainer/run_tiny_cpu.sh", steps, *overrides]
    subprocess.run(command, cwd=tree, check=True, env=environment)


def calls(records: Path) -> Iterator[tuple[float, str]]:
    """Yield time and file of the recorded calls of all processes."""
    for path in records.glob("*.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            time, _, name = line.partition(" ")
            yield float(time), name


def files_of_step(records: Path) -> list[Path]:
    """Return the files that ran between the driver's calls of ``prepare`` for a step and for the next one.

    Raises: SystemExit if the run had fewer steps.
    """
    recorded = sorted(calls(records))
    prepared = [time for time, name in recorded if name == "prepare"]
    if len(prepared) <= STEP:
        sys.exit(f"the driver prepared {len(prepared)} batches, and not {STEP + 1}")
    begin = prepared[STEP - 1]
    end = prepared[STEP]
    return sorted({Path(name) for time, name in recorded if begin <= time < end and name != "prepare"})


def main() -> None:
    """Train, and print the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to run (default: this one)")
    parser.add_argument("--lines", action="store_true", help="also print the number of lines of each file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides for the run")
    options = parser.parse_args()
    tree = options.tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make_inputs(out, tree)
        train(out, tree, options.overrides)
        files = files_of_step(out / "records")
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    for file, count in lines.items():
        print(f"{count:6d} {file.relative_to(tree)}" if options.lines else file.relative_to(tree))
    print(f"{len(files)} files, {sum(lines.values())} lines")


if __name__ == "__main__":
    main()
