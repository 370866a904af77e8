"""``ray_kwargs.fork_workers``: the same numbers and the same ends, whoever starts the processes of a run."""

import re
import shutil
import signal
import tempfile
import threading
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

from .conftest import REPOSITORY, Run, assert_bit_for_bit, is_of_session, leftovers
from .test_signals import wait_for_worker
from .test_train import TWO_WORKERS, assert_names_the_death

FULL = pytest.mark.full
FORKS, PLAIN = ({"ray_kwargs.fork_workers": chosen} for chosen in (None, False))
AGENTS = {"ray::RuntimeEnvAgent"}
STEPS = 2
SAVED = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS}


@pytest.fixture
def alone():
    """Variables of a run that has its own temporary folder, and whose workers are not forks of the tests' server."""
    folder = tempfile.mkdtemp(prefix="vf")  # Ray has sockets in it, whose paths may have about 100 characters
    yield {"PYTHONPATH": str(REPOSITORY), "TMPDIR": folder}
    wait_until(lambda: not [*Path(folder).glob("verl-fork-*")])  # a guard removes those of a process that was killed
    shutil.rmtree(folder)


class Forks(threading.Thread):
    """Notes which processes of Ray in a session the raylet has not started."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.session = session
        self.names: set[str] = set()
        self.others: set[str] = set()
        self.is_fork: dict[int, bool] = {}  # at first sight: at the end of a run a process may lose its parent
        self.is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.is_over.wait(0.5):
            for process in psutil.process_iter():
                try:
                    name = process.name()
                    if not name.startswith("ray::") or not is_of_session(process, self.session):
                        continue
                    if process.pid not in self.is_fork:
                        self.is_fork[process.pid] = process.parent().name() != "raylet"
                        continue  # perhaps a process on the way to another program, which has this name for an instant
                    known = self.names if self.is_fork[process.pid] else self.others
                    known.add(name.partition(".")[0])
                except (psutil.NoSuchProcess, AttributeError):
                    continue


def train(workspace, name, overrides, env, module="verl.trainer.main_ppo") -> tuple[Run, Forks]:
    with workspace.start(name, SAVED | overrides, env, module) as process:
        forks = Forks(process.pid)
        try:
            output = process.communicate()[0]
        finally:
            forks.is_over.set()
    assert process.returncode == 0, output
    assert not leftovers(process.pid)
    return Run(process.returncode, output, 0.0, workspace.folder / name), forks


def weights_of(run: Run) -> dict[str, bytes]:
    folder = run.folder / f"global_step_{STEPS}" / "actor"
    files = {path: zipfile.ZipFile(path) for path in sorted(folder.rglob("*model*.pt"))}
    # The rest holds hashes of Python, which differ between any two processes.
    return {f"{path.name} {name}": file.read(name) for path, file in files.items() for name in file.namelist()
            if "/data/" in name}  # fmt: skip


KINDS = {
    "common": {},
    "two": TWO_WORKERS,
    "async": {"actor_rollout_ref.rollout.mode": "async"},
    "critic": {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8},
    "fsdp2": {"actor_rollout_ref.actor.strategy": "fsdp2"},
    "hf": {"actor_rollout_ref.rollout.name": "hf"},
}
CASES = [("common", True), ("two", True), ("async", False), ("critic", False), ("fsdp2", False), ("hf", False)]


@FULL  # utils/test_fork_server.py holds what a fork is, test_readme.py runs on forks
@pytest.mark.parametrize("kind, is_plain", [("common", False), *CASES])
def test_forks_change_no_bit(workspace, alone, kind, is_plain):
    """Neither the numbers nor the random states nor the weights; and the lines of the processes are shown.

    A run that is not plain has processes that are forks of the tests' server.
    """
    name = f"{kind}-{is_plain}"
    changes = KINDS[kind] | ({"critic.model.path": workspace.model} if kind == "critic" else {})
    started, none = train(workspace, f"started-{name}", changes | PLAIN, alone if is_plain else {})
    forked, forks = train(workspace, f"forked-{name}", changes | FORKS, alone)
    assert not is_plain or not none.names and {"ray::TaskRunner", "ray::WorkerDict"} <= none.others
    assert {"ray::TaskRunner", "ray::WorkerDict"} <= forks.names and forks.others <= AGENTS, forks.others
    assert_bit_for_bit(forked, started, range(1, STEPS + 1))
    assert weights_of(forked) == weights_of(started) != {}
    for run in (started, forked):
        assert "launch to the end of the first step:" in run.output
    keys = [{key for key in run.steps[STEPS] if key.startswith("timing_s/")} for run in (started, forked)]
    assert keys[0] == keys[1]


@FULL
def test_a_trainer_that_was_ready_changes_no_bit(workspace, alone):
    """As on a GPU, where nothing is forked."""
    started, none = train(workspace, "started-late", PLAIN, alone)
    ready, ahead = train(workspace, "started-ahead", FORKS, alone, "tests.special_e2e.ready_trainer")
    assert not none.names and {"ray::TaskRunner", "ray::WorkerDict"} <= none.others
    assert ahead.names == {"ray::TaskRunner"} and "ray::WorkerDict" in ahead.others
    assert_bit_for_bit(ready, started, range(1, STEPS + 1))
    assert weights_of(ready) == weights_of(started) != {}


def name_of(chosen) -> str:
    return "forked" if chosen == FORKS else "plain"


@FULL
@pytest.mark.parametrize("chosen", [FORKS, PLAIN], ids=name_of)
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_run(workspace, alone, chosen, number, code):
    overrides = chosen | {"trainer.total_training_steps": 10_000}
    with workspace.start(f"{name_of(chosen)}-signal-{number}", overrides, alone) as process:
        wait_for_worker(process)
        process.send_signal(number)
        output = process.communicate()[0]
    assert process.returncode == code, output
    assert not leftovers(process.pid)


@FULL
@pytest.mark.parametrize("chosen, rank", [(FORKS, 0), (FORKS, 1), (PLAIN, 1)])
def test_the_death_of_a_worker_ends_the_run(workspace, alone, tmp_path, chosen, rank):
    """Of the one that is named, and not of its peer, although both may be forks of one process."""
    fault = {"VERL_FAULT": f"kill:generate:rank={rank}:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = workspace.train(f"{name_of(chosen)}-die-{rank}", TWO_WORKERS | chosen, env=alone | fault, fails=True)
    assert_names_the_death(run.output, rank, "generate", 2)


@FULL
@pytest.mark.parametrize("chosen", [FORKS, PLAIN], ids=name_of)
@pytest.mark.parametrize(
    "action, target, what",
    [
        ("kill", None, "the trainer process was killed by SIGKILL"),
        ("crash", None, "the trainer process was killed by SIG(SEGV|ABRT)"),
        ("hang", None, r"the trainer process has not answered for \d s: it is stopped \(SIGSTOP\)"),
        ("kill", "raylet", "Ray's raylet was killed by SIGKILL"),
        ("kill", "gcs", "Ray's GCS was killed by SIGKILL"),
    ],
)
def test_a_lost_process_is_named_and_ends_the_run(workspace, alone, tmp_path, chosen, action, target, what):
    on = f":on={target}" if target else ""
    fault = {"VERL_FAULT": f"{action}:trainer_reward:step=2{on}", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    name = f"{name_of(chosen)}-{action}-{target}"
    limits = chosen | {"trainer.worker_call_timeout_s": 4}
    run = workspace.train(name, limits, env=alone | fault, fails=True, module="tests.special_e2e.lost_runs")
    message = re.sub(r" \(pid \d+\)", "", run.output[run.output.rindex("\nError: ") :])
    assert re.search(f"LostProcessError: {what}; the trainer was in phase reward, step 2", message), message


def test_a_run_that_is_refused_leaves_no_server(workspace, alone):
    """The server starts before the checks."""
    with workspace.start("forked-refused", FORKS | {"data.train_batch_size": 0}, alone) as process:
        output = process.communicate()[0]
    assert process.returncode == 2 and "data.train_batch_size" in output
    assert not leftovers(process.pid)


def test_a_run_that_cannot_be_composed_leaves_no_server(workspace, alone):
    """The server starts before that, too."""
    with workspace.start("forked-unknown", FORKS | {"trainer.nonsense": 1}, alone) as process:
        output = process.communicate()[0]
    assert process.returncode and "nonsense" in output
    assert not leftovers(process.pid)
