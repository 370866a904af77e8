import os
import select
import signal
import subprocess
import sys
import threading
import traceback

import psutil
import pytest

from tests.waiting import wait_until
from verl.utils.process import lifetime
from verl.utils.process.lifetime import WatchedProcess, start_process
from verl.utils.process.pool import DeadlinePool

UNKNOWN = "has died: SIGKILL, os._exit, or a crash (the system does not tell which)"


@pytest.mark.parametrize(
    "code, ending",
    [
        ("import os; os._exit(3)", "has ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_told(code, ending):
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    watched = WatchedProcess("child", child.pid)
    assert watched.ending() is None and str(watched) == f"child (pid {child.pid})"
    child.communicate(b"\n")  # reaps it, as the parent of a process that is not a child of this one
    assert watched.ending() in (ending, UNKNOWN)
    assert WatchedProcess("child", child.pid).ending() == UNKNOWN


def test_a_stopped_process_is_told():
    with subprocess.Popen(["sleep", "3600"]) as child:
        watched = WatchedProcess("child", child.pid)
        assert not watched.is_stopped()
        child.send_signal(signal.SIGSTOP)
        wait_until(watched.is_stopped)
        child.kill()
        wait_until(lambda: watched.ending() is not None)


@pytest.mark.parametrize("kills, is_told", [([3, 3], False), ([3, 4], True), ([None, 4], False)])
def test_a_lack_of_memory_is_told(monkeypatch, kills, is_told):
    """The kernel counts the processes that it has killed for lack of memory; it does not tell which."""
    monkeypatch.setattr(lifetime, "oom_kills", lambda: kills.pop(0) if len(kills) > 1 else kills[0])
    child = subprocess.Popen(["sleep", "3600"])
    watched = WatchedProcess("child", child.pid)
    child.kill()
    wait_until(lambda: watched.ending() is not None)
    assert ("because memory ran out" in watched.ending()) == is_told


def test_the_kernel_counts_what_it_kills_for_lack_of_memory():
    assert lifetime.oom_kills() is not None and lifetime.oom_kills() >= 0


# ---- processes that must not outlive another

MORTAL = "from verl.utils.process.lifetime import die_with_parent; die_with_parent(); print(flush=True); input()"


def test_a_process_outlives_the_thread_that_asked_for_it():
    """The kernel ends such a process with the thread that started it, so that must be another one."""
    started = []
    command = [sys.executable, "-c", MORTAL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

    def start():
        started.append(start_process(command, **pipes))
        started[0].stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(timeout=0.5)
    assert started[0].communicate(b"\n")[0] == b"" and started[0].returncode == 0


def test_a_pool_outlives_the_thread_that_started_it():
    pool = DeadlinePool(abs, 1)
    thread = threading.Thread(target=pool.map, args=([(-1,)], 60, 60))
    thread.start()
    thread.join()
    (worker,) = pool._workers
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(timeout=0.5)
    assert pool.map([(-2,)], 60, 60) == [2] and pool._workers == [worker]
    pool.close()


def test_an_interrupted_start_leaves_no_process(monkeypatch):
    made, is_interrupted = [], threading.Event()

    def waits_for_the_start():
        stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        return "result" in [frame.f_code.co_name for frame, _ in stack]

    def slow_start(command, options):
        while not is_interrupted.wait(0.05):
            if waits_for_the_start():  # or is about to, and then the signal may come too early to end its wait
                signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        made.append(subprocess.Popen(command, **options))
        return made[0]

    def interrupt(*_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        is_interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(lifetime, "_popen", slow_start)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_process(["sleep", "3600"])
    finally:
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: made and made[0].returncode == -signal.SIGKILL)


GUARDED = """
import os, signal, subprocess, sys
import psutil
from verl.utils.process.lifetime import end_with_this_process
children = [subprocess.Popen(["sleep", "3600"], start_new_session=True) for _ in range(2)]
children[1].send_signal(signal.SIGSTOP)
end_with_this_process(psutil.Process().children())
print(*[child.pid for child in psutil.Process().children()], flush=True)
number = int(sys.argv[1])
os.kill(os.getpid(), number) if number == signal.SIGKILL else os.killpg(0, number)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_processes_end_with_one_that_is_killed(number):
    """One of them is stopped; a terminal signals the whole group, the guard too."""
    parent = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(int(number))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    guarded = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.communicate()
    assert len(guarded) == 3
    psutil.wait_procs(guarded)


GROUP = """
import os, subprocess, sys
from verl.utils.process.lifetime import guarded_group
hands_over = "import subprocess, sys; print(subprocess.Popen(['sleep', '100000']).pid, flush=True); sys.stdin.read()"
def start(group):
    command = [sys.executable, "-I", "-S", "-c", hands_over]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=group)
    print(first.pid, first.stdout.readline().strip(), flush=True)
    first.kill()  # its child has no parent then, and stands in no list of descendants
    first.wait()
try:
    with guarded_group() as group:
        start(group)
        how = sys.stdin.readline().strip()
        if how == "fails":
            raise KeyboardInterrupt
        if how == "dies":
            os.kill(os.getpid(), 9)
except KeyboardInterrupt:
    pass
print("goes on", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("how", "ends"), [("fails", True), ("dies", True), ("succeeds", False)])
def test_a_group_ends_with_a_block_that_fails(how, ends):
    """Also a process that lost its parent before anybody could list it."""
    with subprocess.Popen(
        [sys.executable, "-c", GROUP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        child = int(process.stdout.readline().split()[1])
        assert os.getpgid(child) != process.pid and os.getsid(child) == process.pid
        end = select.poll()
        end.register(os.pidfd_open(child), select.POLLIN)
        process.stdin.write(f"{how}\n")
        process.stdin.flush()
        assert process.stdout.readline() == ("" if how == "dies" else "goes on\n")
        if not ends:
            assert not end.poll(0)
            os.kill(child, signal.SIGKILL)
        assert end.poll()
        process.kill()


CHECKS = """
import os, sys, threading, time
from verl.utils.process.lifetime import passes_in_fork, start_process

def imports():
    sys.modules["of the check"] = None
    print("checked in", os.getpid() != int(os.environ["LAUNCHER"]))

def refuses():
    raise ValueError("a bad row")

os.environ["LAUNCHER"] = str(os.getpid())
start_process(["true"]).wait()  # a thread that waits for more
assert passes_in_fork(imports) and "of the check" not in sys.modules
for check in (refuses, lambda: sys.exit(0), lambda: os._exit(3), lambda: os.kill(os.getpid(), 9)):
    assert not passes_in_fork(check)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
assert not passes_in_fork(imports), "a thread may hold what the check needs"
"""


def test_a_check_in_a_fork_leaves_nothing_behind():
    done = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "checked in True\n" and done.stderr == ""
