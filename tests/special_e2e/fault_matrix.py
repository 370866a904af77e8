"""Every process of a run x every phase x every fault, each in a real run that must end well and resume bit for bit.

``python -m tests.special_e2e.fault_matrix [--cells 'trainer/*/kill' ...] [--folder FOLDER] [--page]``

A cell is ``process/phase/fault``. Results go to a file of the folder one by one; the same command goes on with the
cells that the file lacks. ``--page`` writes the table of ``docs/fault_matrix.md`` from it and runs nothing. Remove the
folder after a change of the code, since it also holds the runs without a fault.
"""

import argparse
import fnmatch
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from tests.conftest import preloaded

from .conftest import REPOSITORY, Run, Workspace, assert_bit_for_bit
from .test_reward_models import OWN_POOL, scored_by, write_reward_model
from .test_train import PPO, TWO_WORKERS

FOLDER = REPOSITORY / "outputs" / "fault_matrix"
PAGE = REPOSITORY / "docs" / "fault_matrix.md"
TABLE = "## Table\n\n"
LAST_STEP = 3
CALL_TIMEOUT_S = 40
START_TIMEOUT_S = 120
END_WITHIN_S = 60
MEMORY_PATIENCE_S = 30

PROCESSES = (
    "launch",
    "trainer",
    "actor",
    "critic",
    "reference",
    "reward model",
    "gcs",
    "raylet",
    "vLLM",
    "second worker",
    "clock back",
    "clock forward",
)
"""Those of a run with the plain engine, then of one with vLLM, of one with two workers that share vLLM's tensors, and
a trainer that is hit when the wall clock jumps."""
PHASES = ("start", "generate", "infer", "update", "sync", "checkpoint", "validation")
FAULTS = {"kill": "SIGKILL", "hang": "SIGSTOP", "term": "SIGTERM", "raise": "exception", "slow": "slow"}
SIGNALS = ("kill", "hang", "term")

TRAINER_POINTS = {
    "start": "trainer_init_model:step=0",
    "generate": "trainer_generate:step=3",
    "infer": "trainer_old_log_prob:step=3",
    "update": "trainer_update_actor:step=3",
    "sync": "trainer_weight_sync:step=3",
    "checkpoint": "trainer_save_checkpoint:step=3",
    "validation": "trainer_validate:step=3",
}
"""The points at which the trainer is hit, or at which it hits another process."""
WORKER_POINTS = {
    ("actor", "start"): "before_init_model",
    ("actor", "generate"): "generate:step=3",
    ("actor", "infer"): "before_compute_log_prob:step=3",
    ("actor", "update"): "update_actor:step=3",
    ("actor", "sync"): "weight_sync:step=3",
    ("actor", "checkpoint"): "save_checkpoint:step=3",
    ("actor", "validation"): "generate:step=0",
    ("critic", "infer"): "before_compute_values:step=3",
    ("critic", "update"): "update_critic:step=3",
    ("reference", "infer"): "before_compute_ref_log_prob:step=3",
    ("reward model", "start"): "before_init_model",
    ("reward model", "infer"): "compute_rm_score:step=3",
}
WORKER_POINTS |= {("vLLM", phase): WORKER_POINTS["actor", phase] for phase in ("generate", "sync", "validation")}
WORKER_POINTS |= {("second worker", phase): WORKER_POINTS["actor", phase] for phase in PHASES}
CLOCKS = {"clock back": -3600, "clock forward": 3600}
"""How many seconds the wall clock jumps."""
CLOCK_SOURCE = Path(__file__).with_name("jumping_clock.c")
NAMES = {
    "trainer": "the trainer process",
    "gcs": "Ray's GCS",
    "raylet": "Ray's raylet",
}


@dataclass(frozen=True)
class Cell:
    """One fault of one process in one phase."""

    process: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.process}/{self.phase}/{self.fault}"

    @property
    def why_not(self) -> str | None:
        """Return why there is no such run; None if there is."""
        if self.process in ("gcs", "raylet") and self.fault not in SIGNALS:
            return "runs no code of ours"
        if self.process == "launch" and self.fault not in SIGNALS:
            return "only waits"
        if self.process == "launch" and self.fault == "hang":
            return "the run goes on without its terminal"
        if self.process in ("reward model", "vLLM") and (self.process, self.phase) not in WORKER_POINTS:
            return "has no part in it"
        if self.process in CLOCKS and self.phase != "update":
            return "as in the update"
        if self.process in CLOCKS and self.fault not in ("hang", "slow"):
            return "waits for no deadline"
        if self.process in ("critic", "reference") and (self.process, self.phase) not in WORKER_POINTS:
            return "in the process of the actor"
        return None

    @property
    def variable(self) -> str:
        """Return the value of ``VERL_FAULT``."""
        if self.process == "trainer" or self.process in CLOCKS:
            return f"{self.fault}:{TRAINER_POINTS[self.phase]}"
        point = WORKER_POINTS.get((self.process, self.phase))
        if point is not None:
            return f"{self.fault}:{point}:rank={self.rank}"
        return f"{self.fault}:{TRAINER_POINTS[self.phase]}:on={self.process}"

    @property
    def rank(self) -> int:
        """Return the rank of the worker that is hit."""
        return int(self.process == "second worker")

    @property
    def limit_s(self) -> int:
        """Return the most seconds from the fault to the end."""
        if self.fault != "hang":
            return END_WITHIN_S
        starts = self.phase == "start" and (self.process, self.phase) in WORKER_POINTS
        return END_WITHIN_S + (START_TIMEOUT_S if starts else CALL_TIMEOUT_S)

    @property
    def culprit(self) -> str | None:
        """Return the pattern that the last message must have; None if the process that would write it is dead."""
        if self.process == "launch":
            return None if self.fault == "kill" else "terminated"
        if self.fault == "raise":
            return "InjectedFault: injected at " + self.variable.split(":")[1]
        phase = TRAINER_POINTS[self.phase].partition(":")[0].removeprefix("trainer_")
        if self.process == "trainer" and self.fault == "term":
            return "LostProcessError: the trainer process .* phase "  # Ray lets it work on for a moment
        if self.process in NAMES or self.process in CLOCKS:
            return f"LostProcessError: {NAMES.get(self.process, NAMES['trainer'])} .* phase {phase}"
        kind = "WorkerTimeoutError" if self.fault == "hang" else "WorkerDiedError"
        return f"{kind}: worker rank {self.rank} .*phase "


CELLS = [Cell(*names) for names in itertools.product(PROCESSES, PHASES, FAULTS)]


@dataclass(frozen=True)
class Result:
    """The outcome of a cell: ``problem`` is empty if all held."""

    cell: str
    problem: str
    seconds_to_end: float
    message: str


# ---- running a cell


class Matrix:
    """Runs cells in a workspace, and compares what they resume to with whole runs."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @cached_property
    def _reward_model(self) -> Path:
        return write_reward_model(self.workspace)

    def _setting(self, process: str) -> tuple[str, dict[str, object]]:
        """Return the name and the overrides of the run in which a process is hit."""
        common: dict[str, object] = {
            "actor_rollout_ref.rollout.name": "hf",
            "trainer.total_training_steps": LAST_STEP,
            "trainer.save_freq": 2,
            "trainer.test_freq": LAST_STEP,
            "trainer.val_before_train": True,
            "trainer.worker_call_timeout_s": CALL_TIMEOUT_S,
            "trainer.ray_wait_register_center_timeout": START_TIMEOUT_S,
        }
        if process == "reward model":
            return "whole-with-reward-model", common | OWN_POOL | scored_by(self._reward_model, self.workspace)
        with_critic = common | PPO | {"critic.model.path": self.workspace.model}
        vllm = {"actor_rollout_ref.rollout.name": "vllm"}
        if process == "vLLM":
            return "whole-with-vllm", with_critic | vllm
        if process == "second worker":
            # The peer gives up before the driver does, so that the driver knows which of the two is silent.
            patience = {"actor_rollout_ref.nccl_timeout": CALL_TIMEOUT_S // 2}
            return "whole-of-two-workers", with_critic | vllm | TWO_WORKERS | patience
        return "whole", with_critic

    def _whole(self, name: str, overrides: dict[str, object]) -> Run:
        """Return the run without a fault, if it is there already."""
        run = Run(0, "", 0.0, self.workspace.folder / name)
        if (run.folder / "metrics.jsonl").exists() and LAST_STEP in run.steps:
            return run
        return self.workspace.train(name, overrides)

    def run(self, cell: Cell) -> Result:
        """Run a cell: the fault, the end, what is left behind, and the resumed run."""
        setting, overrides = self._setting(cell.process)
        whole = self._whole(setting, overrides)
        name = str(cell).replace("/", "-").replace(" ", "-")
        shutil.rmtree(self.workspace.folder / name, ignore_errors=True)  # of an attempt that was interrupted
        proof = self.workspace.folder / f"{name}.fault"
        proof.unlink(missing_ok=True)
        fault = {"VERL_FAULT": cell.variable, "VERL_FAULT_FILE": str(proof)}
        memory = set(Path("/dev/shm").iterdir())
        seconds = 0.0
        message = ""
        try:
            with jumping_clock(CLOCKS.get(cell.process), proof) as clock:
                run = self.workspace.train(name, overrides, env=fault | clock, fails=cell.fault != "slow")
            ended_at = time.time()
            assert proof.exists(), "the fault did not fire"
            if cell.fault != "slow":
                seconds = ended_at - float(proof.read_text().split()[0])
                message = last_message(run.output)
                assert seconds < cell.limit_s, f"ended after {seconds:.0f} s"
                assert cell.culprit is None or re.search(cell.culprit, message), f"the message is {message!r}"
                wait_for_memory(memory)
                run = self.workspace.train(name, overrides)
            assert_bit_for_bit(run, whole, [LAST_STEP])
        except (AssertionError, pytest.fail.Exception) as error:
            return Result(str(cell), str(error), seconds, message)
        shutil.rmtree(run.folder)
        return Result(str(cell), "", seconds, message)


def last_message(output: str) -> str:
    """Return what a run says last, without the ids of processes."""
    start = output.rfind("\nError: ")
    lines = output[start:].strip().splitlines() if start >= 0 else output.strip().splitlines()[-1:]
    return re.sub(r" \(pid \d+\)|\x1b\[0m", "", " ".join(lines[:2]))


@contextmanager
def jumping_clock(jump_s: int | None, moment: Path) -> Iterator[dict[str, str]]:
    """Yield variables with which the wall clock of processes jumps as soon as a file is there; none without a jump."""
    if jump_s is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="clock") as folder:
        library = Path(folder, "jumping_clock.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, CLOCK_SOURCE, "-ldl"], check=True)
        clock = Path(folder, "jump")
        clock.write_bytes(struct.pack("q", 0))
        is_over = threading.Event()

        def set_clock() -> None:
            while not moment.exists() and not is_over.wait(0.1):
                pass
            with clock.open("r+b") as file:  # processes have mapped this file
                file.write(struct.pack("q", jump_s))

        thread = threading.Thread(target=set_clock)
        thread.start()
        try:
            yield {
                "VERL_TEST_PRELOADED": "",  # a fork of a process with the true clock would keep it
                "VERL_TEST_CLOCK": str(clock),
                "LD_PRELOAD": str(library),
            }
        finally:
            is_over.set()
            thread.join()


def wait_for_memory(before: set[Path]) -> None:
    """Wait until no shared memory is left that no process uses."""
    deadline = time.monotonic() + MEMORY_PATIENCE_S
    while True:
        orphans = [path for path in Path("/dev/shm").iterdir() if path not in before and not _is_used(path)]
        if not orphans:
            return
        assert time.monotonic() < deadline, f"left in shared memory: {orphans}"
        time.sleep(1)


def _is_used(path: Path) -> bool:
    for process in psutil.process_iter():
        try:
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


# ---- results


def read_results(path: Path) -> dict[str, Result]:
    """Return the results of a file by cell, the latest of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.cell: result for result in (Result(**json.loads(line)) for line in lines)}


def table(results: dict[str, Result]) -> Iterator[str]:
    """Yield the lines of the table: seconds from the fault to the end. Counts come first, reasons and failures last."""
    possible = [cell for cell in CELLS if cell.why_not is None]
    done = [results[str(cell)] for cell in possible if str(cell) in results]
    failed = [result for result in done if result.problem]
    passed = len(done) - len(failed)
    not_run = len(possible) - len(done)
    yield f"Of {len(possible)} cells {passed} passed, {len(failed)} failed, and {not_run} have not been run."
    yield ""
    yield "| process | phase | " + " | ".join(FAULTS.values()) + " |"
    yield "|---|---|" + "---|" * len(FAULTS)
    impossible: dict[tuple[str, str], list[str]] = {}
    for process, phase in itertools.product(PROCESSES, PHASES):
        cells = [Cell(process, phase, fault) for fault in FAULTS]
        reasons = {cell.why_not for cell in cells}
        if None in reasons:
            yield f"| {process} | {phase} | " + " | ".join(_text(cell, results) for cell in cells) + " |"
        else:
            impossible.setdefault((process, ", ".join(map(str, reasons))), []).append(phase)
    yield ""
    yield "No such run:"
    yield ""
    for (process, reason), phases in impossible.items():
        yield f"- {process} in {', '.join(phases)}: {reason}"
    for (process, reason), faults in _impossible_faults().items():
        yield f"- {process} with {', '.join(faults)}: {reason}"
    if failed:
        yield ""
        yield "Failed:"
        yield ""
        for result in failed:
            problem = re.sub(r"/\S*/", "…/", result.problem.splitlines()[0])  # folders of one machine
            yield f"- {result.cell}: {problem}"


def _impossible_faults() -> dict[tuple[str, str], list[str]]:
    """Return, by process and reason, the faults that have no run in phases in which others have."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for process, phase in itertools.product(PROCESSES, PHASES):
        cells = [Cell(process, phase, fault) for fault in FAULTS]
        if any(cell.why_not is None for cell in cells):
            for cell in cells:
                if cell.why_not is not None:
                    found.setdefault((process, cell.why_not), {})[FAULTS[cell.fault]] = None
    return {key: list(faults) for key, faults in found.items()}


def _text(cell: Cell, results: dict[str, Result]) -> str:
    if cell.why_not:
        return "–"
    result = results.get(str(cell))
    if result is None:
        return "not run"
    if result.problem:
        return "**failed**"
    return "completes" if cell.fault == "slow" else f"{math.ceil(result.seconds_to_end)} s"


def write_page(results: dict[str, Result]) -> None:
    """Replace the table of the page."""
    head = PAGE.read_text().partition(TABLE)[0]
    PAGE.write_text(head + TABLE + "\n".join(table(results)) + "\n")


def main() -> None:
    """Run the chosen cells that have no result yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns of process/phase/fault")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs and of results.jsonl")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} and run nothing")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()  # runs have another working folder
    path = folder / "results.jsonl"
    results = read_results(path)
    if arguments.page:
        write_page(results)
        return
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [cell for cell in CELLS if any(fnmatch.fnmatch(str(cell), pattern) for pattern in arguments.cells)]
    with preloaded() as variables, path.open("a") as file:
        matrix = Matrix(Workspace(folder, variables))
        for cell in chosen:
            if cell.why_not is None and str(cell) not in results:
                result = matrix.run(cell)
                file.write(json.dumps(asdict(result)) + "\n")
                file.flush()
                print(f"{cell}: {result.problem or 'ok'} ({result.seconds_to_end:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
