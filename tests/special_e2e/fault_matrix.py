"""Every process of a run x every phase x every fault, each in a real run that must end well and resume bit for bit.

``python -m tests.special_e2e.fault_matrix [--cells 'trainer/*/kill' ...] [--folder FOLDER] [--page]``

A cell is ``process/phase/fault``, such as ``trainer/update/kill`` or ``scheduler of SGLang, batches/update/kill``.
Results go to a file of the folder one by one; the same command goes on with the cells that the file lacks. ``--page``
writes the tables of ``fault_matrix_results.md`` from it and runs nothing. Remove the folder after a change of the code,
since it also holds the runs without a fault.
"""

import argparse
import fcntl
import fnmatch
import itertools
import json
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from tests.conftest import preloaded
from verl.utils.observe.record import read_entries

from .conftest import REPOSITORY, Run, Workspace, assert_bit_for_bit
from .test_async_rollout import ASYNC, phases_of
from .test_reward_models import OWN_POOL, scored_by, write_reward_model
from .test_standalone_servers import APART, without_engine
from .test_train import PPO, TWO_WORKERS

FOLDER = REPOSITORY / "outputs" / "fault_matrix"
PAGE = Path(__file__).with_name("fault_matrix_results.md")
TABLE = "## Table\n\n"
SGLANG_TABLE = "## SGLang\n\n"
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
    def ends(self) -> bool:
        """Whether the fault ends the run."""
        return self.fault != "slow"

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


# ---- the processes of SGLang


VICTIMS = ("scheduler", "detokenizer", "owner")
PLACES: dict[str, dict[str, object]] = {
    "batches": {"actor_rollout_ref.rollout.mode": "sync"},
    "agent loops": ASYNC,
    "standalone": ASYNC | APART,
}
"""Where SGLang's engine runs, and who asks it."""
ENGINE_POINTS = {
    "generate": "generate:step=3",
    "reward": "trainer_reward:step=3",
    "infer": "before_compute_log_prob:step=3",
    "update": "update_actor:step=3",
    "sync": "weight_sync:step=3",
    "checkpoint": "save_checkpoint:step=2",
    "validation": "generate:step=0",
}
"""Where a process of SGLang is killed: in generation when requests are under way, in the sync between two buckets, and
at the checkpoint of a step after which another one follows, since a run that is over needs no engine."""
ENDINGS = {
    "scheduler": "its engine has died: process scheduler_0 was ended by SIGKILL",
    "detokenizer": "its engine has died: process detokenizer was ended by SIGKILL",
    "owner": "its process has died",
}
_SOCKETS = "verl-sglang-*"


@dataclass(frozen=True)
class EngineCell:
    """SIGKILL of one process of SGLang in one phase of a run."""

    victim: str
    place: str
    phase: str

    why_not = None

    def __str__(self) -> str:
        return f"{self.victim} of SGLang, {self.place}/{self.phase}/kill"

    @property
    def variable(self) -> str:
        """Return the value of ``VERL_FAULT``."""
        return f"kill:{ENGINE_POINTS[self.phase]}:rank=0:on={self.victim}"

    @property
    def ends(self) -> bool:
        """Whether the death ends the run; a standalone server is replaced."""
        return self.place != "standalone"

    @property
    def resumes(self) -> bool:
        """Whether the run is started again; it does not tell which of an engine's processes was killed."""
        return self.ends and self.victim == "scheduler"

    @property
    def culprit(self) -> str:
        """Return the pattern that the last message must have, or the log of a run that goes on."""
        if self.ends:
            server = r"rollout server (sglang_server_0|0 of 1 \(actor \w+\))"  # its own name, or that of agent loops
            return f"phase .*, step .*{server}: {ENDINGS[self.victim]}"
        return f"rollout server sglang_server_0_0 (starts|has started) again: .*{ENDINGS[self.victim]}"


AnyCell = Cell | EngineCell
ENGINE_CELLS = [EngineCell(*names) for names in itertools.product(VICTIMS, PLACES, ENGINE_POINTS)]


@dataclass(frozen=True)
class Result:
    """The outcome of a cell: ``problem`` is empty if all held."""

    cell: str
    problem: str
    seconds_to_end: float
    message: str


# ---- running a cell

_COMMON: dict[str, object] = {
    "trainer.total_training_steps": LAST_STEP,
    "trainer.save_freq": 2,
    "trainer.test_freq": LAST_STEP,
    "trainer.val_before_train": True,
    "trainer.worker_call_timeout_s": CALL_TIMEOUT_S,
    "trainer.ray_wait_register_center_timeout": START_TIMEOUT_S,
}
OF_SGLANG: dict[str, object] = {
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.skip_tokenizer_init": False,  # else there is no detokenizer
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,  # two updates a step need the old log-probabilities
    "trainer.worker_call_timeout_s": 300,  # a death has no deadline, and an engine may take a minute to start
}


class Matrix:
    """Runs cells in a workspace, and compares what they resume to with whole runs."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    @cached_property
    def _reward_model(self) -> Path:
        return write_reward_model(self.workspace)

    def _setting(self, process: str) -> tuple[str, dict[str, object]]:
        """Return the name and the overrides of the run in which a process is hit."""
        common = _COMMON | {"actor_rollout_ref.rollout.name": "hf"}
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

    def run(self, cell: AnyCell) -> Result:
        """Run a cell: the fault, the end, what is left behind, and the resumed run."""
        return self._run_of_engine(cell) if isinstance(cell, EngineCell) else self._run(cell)

    def _run(self, cell: Cell) -> Result:
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

    def _run_of_engine(self, cell: EngineCell) -> Result:
        overrides = _COMMON | OF_SGLANG | PLACES[cell.place]
        whole = self._whole(f"whole-sglang-{cell.place.replace(' ', '-')}", overrides)
        name = re.sub(r"\W+", "-", str(cell))
        shutil.rmtree(self.workspace.folder / name, ignore_errors=True)
        result, run = kill_process_of_engine(self.workspace, cell, name, overrides)
        try:
            if run is not None and cell.resumes:
                run = self.workspace.train(name, overrides)
            if run is not None and (cell.resumes or not cell.ends):
                assert_same_training(run, whole)
            if run is not None:
                shutil.rmtree(run.folder)
        except (AssertionError, pytest.fail.Exception) as error:
            return replace(result, problem=str(error))
        return result


def kill_process_of_engine(
    workspace: Workspace, cell: EngineCell, name: str, overrides: dict[str, object]
) -> tuple[Result, Run | None]:
    """Run until a process of SGLang is killed, and to the end; look at what is left behind.

    The run is None if it did not end as it should.
    """
    proof = workspace.folder / f"{name}.fault"
    proof.unlink(missing_ok=True)
    fault = {"VERL_FAULT": cell.variable, "VERL_FAULT_FILE": str(proof)}
    memory = set(Path("/dev/shm").iterdir())
    sockets = set(Path(tempfile.gettempdir()).glob(_SOCKETS))
    seconds = 0.0
    message = ""
    try:
        run = workspace.train(name, overrides, env=fault, fails=cell.ends)
        ended_at = time.time()
        (workspace.folder / f"{name}.log").write_text(run.output)
        assert proof.exists(), "the fault did not fire"
        assert not (left := processes_with("VERL_FAULT_FILE", str(proof))), f"left processes behind: {left}"
        if cell.ends:
            seconds = ended_at - float(proof.read_text().split()[0])
            message = last_message(run.output)
            assert seconds < END_WITHIN_S, f"ended after {seconds:.0f} s"
            assert re.search(cell.culprit, message), f"the message is {message!r}"
        else:
            assert re.search(cell.culprit, run.output), "no message names the process"
        wait_for_memory(memory)
        wait_for_sockets(sockets)
    except (AssertionError, pytest.fail.Exception) as error:
        return Result(str(cell), str(error), seconds, message), None
    return Result(str(cell), "", seconds, message), run


def assert_same_training(run: Run, whole: Run, steps: Iterable[int] = (LAST_STEP,)) -> None:
    """Assert that a run trained as one without a fault did: the same tokens, rewards, losses and weights.

    SGLang's own log-probabilities may be rounded otherwise, and attempts are made again.
    """
    for step in steps:
        numbers, expected = (without_engine(each.numbers(step)) for each in (run, whole))
        differing = [name for name in numbers | expected if numbers.get(name) != expected.get(name)]
        differing = [name for name in differing if not name.startswith("attempts/")]
        assert not differing, f"these numbers of step {step} differ: {differing}"
        digests, due = (phases_of(read_entries(each.folder / "metrics.jsonl")[step]) for each in (run, whole))
        for parts in [*digests.values(), *due.values()]:
            parts.pop("rollout_log_probs", None)
        assert due and digests == due, f"the digests of step {step} differ"


def processes_with(variable: str, value: str) -> list[str]:
    """Return the titles of the processes that were started with a variable of the environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(variable) == value:
                found.append(" ".join(process.cmdline())[:200])
    return found


def wait_for_sockets(before: set[Path]) -> None:
    """Wait until each new folder of sockets is gone, or is that of an engine that lives."""
    deadline = time.monotonic() + MEMORY_PATIENCE_S
    while True:
        folders = [path for path in Path(tempfile.gettempdir()).glob(_SOCKETS) if path not in before]
        orphans = [path for path in folders if not _is_locked(path / "lock")]
        if not orphans:
            return
        assert time.monotonic() < deadline, f"left folders of sockets: {orphans}"
        time.sleep(1)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is gone
        return not path.parent.exists()
    return False


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
    """Whether a process maps a file, which may have had another name at that time, as semaphores have."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return True  # it has just gone
    mark = f" {os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x} {stat.st_ino} "
    for process in psutil.process_iter():
        try:
            if mark in Path(f"/proc/{process.pid}/maps").read_text():
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
    yield _count(possible, results)
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
    yield from _failures(possible, results)


def _count(cells: Sequence[AnyCell], results: dict[str, Result]) -> str:
    done = [results[str(cell)] for cell in cells if str(cell) in results]
    passed = sum(not result.problem for result in done)
    not_run = len(cells) - len(done)
    return f"Of {len(cells)} cells {passed} passed, {len(done) - passed} failed, and {not_run} have not been run."


def _failures(cells: Sequence[AnyCell], results: dict[str, Result]) -> Iterator[str]:
    failed = [result for cell in cells if (result := results.get(str(cell))) is not None and result.problem]
    if failed:
        yield ""
        yield "Failed:"
        yield ""
    for result in failed:
        problem = re.sub(r"/\S*/", "…/", result.problem.splitlines()[0])  # folders of one machine
        yield f"- {result.cell}: {problem}"


def sglang_table(results: dict[str, Result]) -> Iterator[str]:
    """Yield the lines of the table of SGLang's processes: seconds from the fault to the end."""
    yield _count(ENGINE_CELLS, results)
    yield ""
    yield "| engine | process | " + " | ".join(ENGINE_POINTS) + " |"
    yield "|---|---|" + "---|" * len(ENGINE_POINTS)
    for place, victim in itertools.product(PLACES, VICTIMS):
        cells = [EngineCell(victim, place, phase) for phase in ENGINE_POINTS]
        yield f"| {place} | {victim} | " + " | ".join(_text(cell, results) for cell in cells) + " |"
    yield from _failures(ENGINE_CELLS, results)


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


def _text(cell: AnyCell, results: dict[str, Result]) -> str:
    if cell.why_not:
        return "–"
    result = results.get(str(cell))
    if result is None:
        return "not run"
    if result.problem:
        return "**failed**"
    return f"{math.ceil(result.seconds_to_end)} s" if cell.ends else "completes"


def write_page(results: dict[str, Result]) -> None:
    """Replace the tables of the page of which there are results."""
    head, _, tables = PAGE.read_text().partition(TABLE)
    first, _, second = tables.partition(SGLANG_TABLE)
    if any(str(cell) in results for cell in CELLS):
        first = "\n".join(table(results)) + "\n\n"
    if any(str(cell) in results for cell in ENGINE_CELLS):
        second = "\n".join(sglang_table(results)) + "\n"
    PAGE.write_text(head + TABLE + first + SGLANG_TABLE + second)


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
    chosen = [
        cell
        for cell in [*CELLS, *ENGINE_CELLS]
        if any(fnmatch.fnmatch(str(cell), pattern) for pattern in arguments.cells)
    ]
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
