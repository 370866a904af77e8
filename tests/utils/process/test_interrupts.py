"""``verl.utils.process.interrupts``: a Ctrl-C that comes in a hook is not lost, and leaves no lock taken."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys
from _thread import interrupt_main  # as a signal that comes now: whatever Python code is next is interrupted

moment, is_kept = sys.argv[1], sys.argv[2] == "kept"
if moment == "after the fork":  # just before the hook of logging, which it registers when it is imported
    os.register_at_fork(after_in_parent=interrupt_main)
assert "logging" not in sys.modules
import logging, subprocess, threading, time, weakref
if moment == "before the fork":
    os.register_at_fork(before=interrupt_main)
if is_kept:
    from verl.utils.process.interrupts import keep_interrupts
    keep_interrupts()
    keep_interrupts()
try:
    if moment == "garbage":
        thing = threading.Event()
        kept = weakref.ref(thing, lambda ref: interrupt_main())
        del thing
    else:
        subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], preexec_fn=lambda: None).wait()
    time.sleep(60 if is_kept else 0.2)
    print("lost", end=" ")
except KeyboardInterrupt:
    print("interrupted", end=" ")
thread = threading.Thread(target=logging.getLogger, args=("other",), daemon=True)
thread.start()
thread.join(60 if is_kept else 0.5)
print("stuck" if thread.is_alive() else "free")
"""
WITHOUT = {"before the fork": "lost free", "after the fork": "lost stuck", "garbage": "lost free"}


def end_of(moment: str, how: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, moment, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_no_interruption_is_lost() -> None:
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda moment: end_of(moment, "kept"), WITHOUT))
    assert found == [("interrupted free", "")] * len(WITHOUT)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the hooks of logging are no Python code any more")
def test_python_itself_loses_them() -> None:
    """What the module is for; if this fails on a newer Python, less may be needed."""
    with ThreadPoolExecutor() as threads:
        found = dict(zip(WITHOUT, threads.map(lambda moment: end_of(moment, "plain")[0], WITHOUT), strict=True))
    assert found == WITHOUT


SEVERAL = """
import os, signal, time
from verl.utils.process import interrupts
from verl.utils.process.interrupts import catch_signals, count_of_signals, signal_of_the_end
interrupts._QUICK_S = 1e9  # as on a machine that is not busy
catch_signals()
seen = 0
try:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100_000)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # clean-up goes on
            os.kill(os.getpid(), number)
            seen += 1
except KeyboardInterrupt:
    print(seen, count_of_signals(), signal_of_the_end() == signal.SIGTERM)
interrupts._QUICK_S = 0.0
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100_000)
except KeyboardInterrupt:
    print("again")
"""


def test_several_quick_signals_interrupt_once() -> None:
    done = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "2 3 True\nagain\n", done.stderr


STARTING = """
import signal, sys
if sys.argv[1] == "command":
    sys.orig_argv = ["python", "-m", "verl.trainer.main_ppo", "a=b"]
import verl
signal.raise_signal(int(sys.argv[2]))
"""


@pytest.mark.parametrize("number, code, name", [(2, 130, "interrupted"), (15, 143, "terminated")])
def test_a_signal_ends_a_command_that_still_imports(number: int, code: int, name: str) -> None:
    """With a line in place of a trace, from the first module of this package on; a program that imports it is not."""
    command = [sys.executable, "-c", STARTING]
    done = subprocess.run([*command, "command", str(number)], capture_output=True, text=True, cwd=REPOSITORY)
    line = f"{name} before the run began: nothing is lost, and the same command starts it"
    assert (done.returncode, done.stderr.strip()) == (code, line)
    done = subprocess.run([*command, "other", str(number)], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == -number
