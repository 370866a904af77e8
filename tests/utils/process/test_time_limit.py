"""Time limits of code in this process: other threads, Ctrl-C, and errors without a message."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from verl.utils.process.time_limit import TimeLimitExceeded, UserCodeFailed, call_within, time_limit


def test_the_inner_limit_ends_first_and_the_outer_one_still_holds():
    with pytest.raises(TimeLimitExceeded), time_limit(0.4):
        with pytest.raises(TimeLimitExceeded), time_limit(0.1):
            time.sleep(3600)
        time.sleep(3600)


def test_limits_of_other_threads():
    ends = []

    def spin():
        try:
            with time_limit(0.1):
                while True:
                    pass
        except TimeLimitExceeded:
            ends.append(time.monotonic())

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 3


TRACED = """
import sys, threading
from verl.utils.process.time_limit import TimeLimitExceeded, time_limit

def body():
    try:
        with time_limit({seconds}):
            while {loops}:
                pass
    except TimeLimitExceeded:
        print("exceeded")

thread = threading.Thread(target=body)
thread.start()
thread.join()
sys.{tool}(lambda *arguments: None)
(lambda: None)()
print("traced")
"""


@pytest.mark.parametrize("tool", ["settrace", "setprofile"])
@pytest.mark.parametrize(
    ("seconds", "loops", "expected"), [(60, False, ["traced"]), (0.1, True, ["exceeded", "traced"])]
)
def test_debuggers_and_profilers_work_after_a_limit_in_a_thread(tool, seconds, loops, expected):
    program = TRACED.format(tool=tool, seconds=seconds, loops=loops)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == expected, run.stderr


def test_an_interrupt_that_the_body_swallows_does_not_reach_the_code_after_it():
    ends = []

    def swallow():
        with time_limit(0.05) as limit:
            while not limit.is_exceeded:
                try:
                    time.sleep(0.01)
                except TimeLimitExceeded:
                    break
        for _ in range(1000):  # here an exception that was left over would be raised
            pass
        ends.append(limit.is_exceeded)

    threads = [threading.Thread(target=swallow) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [True] * 20


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (KeyboardInterrupt(), "raised KeyboardInterrupt: "),
        (SystemExit(3), "raised SystemExit: 3"),
        (Mute(), "raised Mute, whose message cannot be read"),
    ],
)
def test_what_code_raises_is_told(raised, message):
    def body():
        raise raised

    with pytest.raises(UserCodeFailed) as caught:
        call_within(30, body)
    assert str(caught.value) == message and "raise raised" in caught.value.trace


@pytest.mark.parametrize("swallows", [False, True])
def test_ctrl_c_stops_the_caller_also_if_the_body_swallows_it(swallows):
    def body():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not swallows:
                raise ValueError("hidden") from None

    with pytest.raises(KeyboardInterrupt):
        call_within(30, body)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
