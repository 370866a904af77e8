import signal
import subprocess
import sys
import time

import pytest

from verl.utils.processes import WatchedProcess

UNKNOWN = "has died: SIGKILL, os._exit, or a crash (the system does not tell which)"


def wait_for(condition, patience_s=10):
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    "code, ending",
    [
        ("import os; os._exit(3)", "has ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL, as the kernel does when memory runs out"),
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
    with subprocess.Popen(["sleep", "60"]) as child:
        watched = WatchedProcess("child", child.pid)
        assert not watched.is_stopped()
        child.send_signal(signal.SIGSTOP)
        assert wait_for(watched.is_stopped)
        child.kill()
        assert wait_for(lambda: watched.ending() is not None)
