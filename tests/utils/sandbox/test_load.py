"""Verdicts do not depend on how busy the machine is, and no program gains by waiting."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from verl.errors import SandboxError
from verl.utils.reward_score import prime_code
from verl.utils.sandbox import Test, clock, cores, isolation_problem, local, run_tests

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")

WORKS = "import time\nlimit = float(input())\nwhile time.process_time() < limit: pass\nprint(7)\n"
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Locks for this test alone."""
    monkeypatch.setattr(cores, "PLACE", str(tmp_path))


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep processes busy."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


# ---- time of the machine


def test_programs_that_wait_for_a_core_lose_no_time(place, monkeypatch):
    """Five on one core, as if each had its own: each waits for longer than it may be idle."""
    monkeypatch.setattr(cores, "usable_cores", lambda: [0, 1, 2, 3, 4])
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with ThreadPoolExecutor(5) as pool:
            runs = list(pool.map(lambda _: run_tests(WORKS, [Test("0.25")], timeout_s=0.3)[0], range(5)))
    finally:
        os.sched_setaffinity(0, allowed)
    assert [run.status for run in runs] == ["ok"] * 5
    assert all(0.25 <= run.seconds <= 0.5 + clock.LEAST_IDLE_LIMIT_S for run in runs)


def test_more_cpu_time_than_the_limit_is_a_timeout_however_short():
    inputs = [Test("0.1"), Test("0.7"), Test("0.1")]
    assert [run.status for run in run_tests(WORKS, inputs, timeout_s=0.3)] == ["ok", "timeout", "ok"]
    tests = [Test(code_after=f"import time\nwhile time.process_time() < {seconds}: pass") for seconds in (0.1, 0.7)]
    assert [run.status for run in run_tests("", tests, timeout_s=0.3)] == ["ok", "timeout"]


@contextmanager
def running(code: str) -> Iterator[int]:
    """Run a program in a process and kill it at the end."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def until_over(used: clock.Clock) -> str:
    while (over := used.look()) is None:
        time.sleep(0.01)
    return over


def test_the_clock_tells_who_took_the_time(monkeypatch):
    with running(SLEEPS) as pid:
        used = clock.Clock(1.0, lambda: [pid])
        used._last -= 3600  # as if this process had not run
        assert used.look() is None and used.counted_s <= clock.LONGEST_STEP_S
        monkeypatch.setattr(clock, "LEAST_IDLE_LIMIT_S", 0.2)
        monkeypatch.setattr(clock, "LEAST_STARVED_LIMIT_S", 0.5)
        monkeypatch.setattr(clock, "STARVED_FACTOR", 1)
        assert until_over(clock.Clock(0.1, lambda: [pid])) == clock.IDLE
        monkeypatch.setattr(clock, "_is_runnable", lambda task: True)  # as if it waited for a core
        assert until_over(clock.Clock(0.1, lambda: [pid])) == clock.STARVED


def test_a_clock_counts_each_group_and_needs_no_word_of_the_kernel_on_waits(monkeypatch):
    with running("while True: pass") as pid:
        assert until_over(clock.Clock(0.1, lambda: [pid])) == clock.CPU
        assert until_over(clock.Clock(0.1, lambda: [], lambda: [pid])) == clock.CPU
    monkeypatch.setattr(clock, "_read", lambda path: "")
    with running(SLEEPS) as pid:
        assert until_over(clock.Clock(0.1, lambda: [pid])) == clock.IDLE
    with running("while True: pass") as pid:
        assert until_over(clock.Clock(0.1, lambda: [pid])) in (clock.CPU, clock.IDLE)


# ---- attacks

BLOCKS = {
    "sleeps": SLEEPS,
    "sleeps in pieces": "import time\nwhile True: time.sleep(0.001)",
    "waits for input": "import os; os.read(os.pipe()[0], 1)",
    "waits for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "threads": "import threading, time\ndef wink():\n    while True: time.sleep(0.05)\n"
    "for _ in range(50): threading.Thread(target=wink).start()",
}
FORKS = {
    "child sleeps": "import os, time\nif os.fork(): os.wait()\nelse: time.sleep(600)",
    "child leaves its session": "import os, time\nif os.fork(): time.sleep(600)\nelse:\n    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n    while True: pass",
    "many children": "import os, time\nfor _ in range(20):\n    if not os.fork():\n        while True: pass\n"
    "time.sleep(600)",
    "children that nobody counts": "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "while True:\n    if not os.fork():\n        while time.process_time() < 0.02: pass\n        os._exit(0)\n"
    "    try: os.wait()\n    except OSError: pass",
}


def first_result_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "may_try_again", lambda: False)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_program_that_blocks_is_ended(name, monkeypatch):
    first_result_counts(monkeypatch)
    run = run_tests(BLOCKS[name], [Test()], timeout_s=0.5)[0]
    assert run.status == "timeout" and run.seconds < 3


@pytest.mark.parametrize("where", ["program", "test"])
def test_a_program_that_blocks_while_it_is_tested_is_ended(where, monkeypatch):
    first_result_counts(monkeypatch)
    code = f"def f(): {SLEEPS if where == 'program' else 'pass'}"
    test = f"f(); {SLEEPS if where == 'test' else 'pass'}"
    assert run_tests(code, [Test(code_after=test)], timeout_s=0.5)[0].status == "timeout"


@pytest.fixture
def unisolated(monkeypatch):
    first_result_counts(monkeypatch)
    monkeypatch.setattr(local, "isolation_problem", lambda: "none")


@pytest.mark.parametrize("name", FORKS)
def test_a_program_that_is_not_isolated_gains_nothing_by_forks(name, unisolated):
    run = run_tests(FORKS[name], [Test()], timeout_s=0.5, allow_unisolated=True)[0]
    assert run.status == "timeout" and run.seconds < 4


def test_what_a_program_leaves_behind_is_killed(unisolated):
    code = """import os, time
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(600)
while not os.fstat(1).st_size: time.sleep(0.01)"""
    run = run_tests(code, [Test()], allow_unisolated=True)[0]
    assert run.status == "ok" and not psutil.pid_exists(int(run.stdout))


# ---- cores


def test_no_more_programs_run_than_there_are_cores(place, monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: [3, 5])
    lock, inside, most = threading.Lock(), [0], [0]

    def supervise(*args: object) -> str:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        with lock:
            inside[0] -= 1
        return ""

    monkeypatch.setattr(local, "_supervise", supervise)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: run_tests("", [Test()]), range(6)))
    assert most[0] == 2


def test_a_run_that_waits_for_a_core_can_be_cancelled(place, monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: [0])
    cancelled = threading.Event()
    with local._core(None), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run_tests, "", [Test()], cancelled=cancelled) for _ in range(2)]
        time.sleep(0.05)
        assert not any(each.done() for each in waiting)
        cancelled.set()
        for each in waiting:
            with pytest.raises(SandboxError, match="cancelled"):
                each.result()


@pytest.mark.parametrize(
    ("groups", "files", "quotas"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/\n", {"cpu.max": "50000 100000"}, [0.5]),
        ("0::/elsewhere\n", {"cpu.max": "400000 100000"}, [4.0]),
        ("3:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, []),
        ("3:cpuacct,cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, [2.0]),
        ("3:cpuset:/a\n", {"a/cpu.max": "50000 100000"}, []),
    ],
)
def test_quotas_of_control_groups(groups, files, quotas, tmp_path):
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "cgroup").write_text(groups)
    assert list(cores._quotas(tmp_path / "cgroup", tmp_path / "mount")) == quotas
    assert list(cores._quotas(Path("/nowhere"), tmp_path)) == []


def test_usable_cores_are_those_of_the_affinity_cut_to_the_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 4})
    for quotas, wanted in (([], [2, 4, 7]), ([2.9, 9.0], [2, 4]), ([0.5], [2])):
        monkeypatch.setattr(cores, "_quotas", lambda *_, quotas=quotas: iter(quotas))
        assert cores.usable_cores() == wanted


# ---- second tries


def replies(monkeypatch: pytest.MonkeyPatch, *said: str) -> list[list[int]]:
    """Let supervisors say these statuses, of each test in turn; return a list of the tests that each was sent."""
    left, asked = list(said), []

    def reply(request, files, cancelled):
        asked.append(request["todo"])
        found = []
        for index in request["todo"]:
            status = left.pop(0)
            fields = {"stdout": "", "stderr": "", "code": 0, "seconds": 0.0, "memory_mb": 0.0, "value": ""}
            found.append({"index": index, "status": status} | fields)
            if request["stop_at_failure"] and status != "ok":
                break
        return found

    monkeypatch.setattr(local, "_reply", reply)
    return asked


@pytest.mark.parametrize(
    ("stops", "said", "statuses", "asked"),
    [
        (False, "ok idle ok ok", "ok ok ok", [[0, 1, 2], [1]]),
        (False, "idle cpu idle idle", "timeout timeout timeout", [[0, 1, 2], [0]]),
        (False, "idle ok idle ok ok", "ok ok ok", [[0, 1, 2], [0], [2]]),
        (False, "starved ok ok cpu", "timeout ok ok", [[0, 1, 2], [0]]),
        (True, "ok idle ok ok", "ok ok ok", [[0, 1, 2], [1], [2]]),
        (True, "ok idle idle", "ok timeout", [[0, 1, 2], [1]]),
        (True, "cpu", "timeout", [[0, 1, 2]]),
    ],
)
def test_a_program_that_ended_by_the_wall_is_tried_once_more(place, monkeypatch, stops, said, statuses, asked):
    sent = replies(monkeypatch, *said.split())
    assert [run.status for run in run_tests("", [Test()] * 3, stop_at_failure=stops)] == statuses.split()
    assert sent == asked


def test_what_got_no_core_twice_has_no_verdict(place, monkeypatch):
    replies(monkeypatch, "starved", "starved")
    with pytest.raises(SandboxError, match="gave the program no core"):
        run_tests("", [Test()])


def test_second_tries_are_limited(place, monkeypatch):
    monkeypatch.setattr(cores, "SECOND_TRIES", 2)
    for tries in (2, 2, 1):
        sent = replies(monkeypatch, "idle", "idle")
        assert run_tests("", [Test()])[0].status == "timeout" and len(sent) == tries
    monkeypatch.setattr(cores, "SECOND_TRIES_WINDOW_S", 0.0)
    assert cores.may_try_again()
    Path(cores.second_core().folder, "tries").write_text("[half")
    assert cores.may_try_again()


# ---- the supervisor


def test_a_supervisor_is_left_when_it_gives_no_sign_of_life(monkeypatch):
    """Its empty lines are such signs. The time of this test passes at each look only."""
    said = [*range(1, 100), *[99] * 100]
    looks = []

    class Process:
        def communicate(self, content, timeout):
            looks.append(said[len(looks)])
            raise subprocess.TimeoutExpired("supervisor", timeout, output=b"\n" * looks[-1])

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: float(len(looks))))
    with pytest.raises(SandboxError, match="no sign of life for 60 s"):
        local._communicate(Process(), b"", 60.0, None)
    assert len(looks) == 99 + 60


# ---- all of it


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_five_hundred_right_programs_on_a_busy_machine():
    """Each uses 0.1 to 0.9 of its CPU time, with eight busy processes on two cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:2])
    limit_s, batches, size = 0.3, 10, 50
    shares = [0.1 + 0.8 * i / (batches * size - 1) for i in range(batches * size)]

    def verdicts(batch: int) -> list[object]:
        inputs = [str(share * limit_s) for share in shares[batch::batches]]
        return prime_code.check_correctness({"inputs": inputs, "outputs": ["7"] * size}, WORKS, limit_s)[0]

    try:
        with load(8), ThreadPoolExecutor(batches) as pool:
            found = [verdict for each in pool.map(verdicts, range(batches)) for verdict in each]
    finally:
        os.sched_setaffinity(0, allowed)
    assert found == [True] * len(shares), [i for i, verdict in enumerate(found) if verdict is not True]
