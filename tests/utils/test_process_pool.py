"""Functions in processes: what they may do to the process that calls them."""

import functools
import os
import signal
import time

import pytest

from verl.utils.import_utils import load_extern_type
from verl.utils.process_pool import START_TIMEOUT_S, DeadlinePool, IsolatedFunction, ProcessStartError
from verl.utils.time_limit import TimeLimitExceeded, UserCodeFailed, time_limit


def test_a_process_that_died_while_it_was_idle_is_replaced():
    pool = DeadlinePool(abs, 2)
    assert pool.map([(-1,), (-2,)], 60, 60) == [1, 2]
    victim = next(slot for slot in pool._slots if slot.call is None).process  # the other may still be starting
    victim.kill()
    victim.wait(timeout=10)
    assert pool.map([(-3,), (-4,), (-5,)], 60, 60) == [3, 4, 5]
    pool.close()


WILD = """
import ctypes, os, time
class Mute(Exception):
    def __str__(self):
        raise ValueError
def f(what, more=0):
    if what == "swallow":
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if what == "compiled":
        return 7 ** 10 ** 9
    if what == "crash":
        ctypes.string_at(0)
    if what == "exit":
        os._exit(3)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "mute":
        raise Mute
    return os.getpid(), more
"""


def isolated(folder, text, start_timeout_s=START_TIMEOUT_S, **keywords):
    path = folder / "wild.py"
    path.write_text(text)
    return IsolatedFunction(functools.partial(load_extern_type, str(path), "f"), keywords, start_timeout_s)


def test_an_isolated_function_answers_from_one_process(tmp_path):
    function = isolated(tmp_path, WILD, more=1)
    first, more = function("pid")
    assert more == 1 and function("pid", more=2) == (first, 2) and first != os.getpid()
    for what, message in (
        ("interrupt", "raised KeyboardInterrupt: "),
        ("mute", "raised Mute, whose message cannot be read"),
        ("exit", "died: its process ended with code 3"),
        ("crash", "died: its process ended with SIGSEGV"),
    ):
        with pytest.raises(UserCodeFailed) as caught:
            function(what)
        assert str(caught.value) == message
    second, _ = function("pid")
    assert second != first
    for what in ("swallow", "compiled"):
        function.start()
        start = time.monotonic()
        with pytest.raises(TimeLimitExceeded), time_limit(0.2):
            function(what)
        assert time.monotonic() - start < 5
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(KeyboardInterrupt), time_limit(30):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            function("swallow")
        finally:
            signal.signal(signal.SIGALRM, previous)
    function.close()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("while True: pass\n", ProcessStartError, "did not end within 0.5 s"),
        ("x = 7 ** 10 ** 9\n", ProcessStartError, "did not end within 0.5 s"),
        ("import os\nos._exit(0)\n", ProcessStartError, "ended with code 0"),
        ("import sys\nsys.exit('no')\n", UserCodeFailed, r"cannot execute .*wild\.py.*SystemExit: no"),
    ],
    ids=["endless", "compiled", "death", "exit"],
)
def test_an_import_that_does_not_return(tmp_path, text, kind, message):
    with pytest.raises(kind, match=message):
        isolated(tmp_path, text, start_timeout_s=5 if "exit" in text else 0.5).start()
