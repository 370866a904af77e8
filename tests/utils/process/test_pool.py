"""Functions in processes: what they may do to the process that calls them."""

import functools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.utils.import_utils import load_extern_type
from verl.utils.process.pool import (
    START_TIMEOUT_S,
    DeadlineExceeded,
    DeadlinePool,
    IsolatedFunction,
    ProcessStartError,
    ScorerFailed,
)
from verl.utils.process.time_limit import TimeLimitExceeded, UserCodeFailed, time_limit


def test_a_process_that_died_while_it_was_idle_is_replaced():
    pool = DeadlinePool(abs, 2)
    assert pool.map([(-1,), (-2,)], 60, 60) == [1, 2]
    victim = next(each for each in pool._workers if not each.is_starting).process  # the other may still be starting
    victim.kill()
    victim.wait()
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
                time.sleep(3600)
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
    if what == "fork":
        return os.fork()
    if what == "memory":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        return len(bytearray(4 << 30))
    if what == "unpicklable":
        return (each for each in "ab")
    if what == "descriptors":
        os.closerange(3, 1000)
    if what == "daemon":
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(4)
    if what == "print":
        print("a line of the scorer")
        return input()
    if what == "thread":
        import threading
        found = []
        thread = threading.Thread(target=found.append, args=[1])
        thread.start()
        thread.join()
        return found
    if what == "loop":
        import asyncio
        return asyncio.run(asyncio.sleep(0, "done"))
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
        ("daemon", "died: its process ended with code 4"),
        ("descriptors", "died: its process ended with code 1"),
        ("memory", "raised MemoryError: "),
        ("unpicklable", "raised TypeError: cannot pickle 'generator' object"),
        ("print", "raised EOFError: EOF when reading a line"),
    ):
        with pytest.raises(UserCodeFailed) as caught:
            function(what)
        assert str(caught.value) == message
    assert function("thread") == [1] and function("loop") == "done"
    second, _ = function("pid")
    assert second != first
    for what in ("swallow", "compiled"):
        function.start()
        with pytest.raises(TimeLimitExceeded), time_limit(0.2):
            function(what)
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(KeyboardInterrupt), time_limit(3600):
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


def test_a_fork_of_the_function_gives_no_second_answer(tmp_path):
    function = isolated(tmp_path, WILD)
    pid, _ = function("pid")
    for _ in range(3):
        assert function("fork") > 0  # the copy, to which fork returns 0, ends silently
        assert function("pid") == (pid, 0)
    function.close()


def test_a_lost_process_costs_the_call_that_it_worked_on(tmp_path):
    function = isolated(tmp_path, WILD)
    whats = [*["pid"] * 5, "exit", *["pid"] * 100, "crash", "swallow", *["pid"] * 5, "mute"]
    outcomes = dict(function.outcomes([{"what": what} for what in whats], 1.0, 60.0))
    wrong = {number: outcome for number, outcome in outcomes.items() if not isinstance(outcome, tuple)}
    assert len(outcomes) == len(whats) and list(wrong) == [5, 106, 107, 113]
    assert wrong[5] == ScorerFailed("died: its process ended with code 3")
    assert wrong[106] == ScorerFailed("died: its process ended with SIGSEGV")
    assert wrong[107] == DeadlineExceeded()
    assert wrong[113].error == "raised Mute, whose message cannot be read"
    assert len({outcome for outcome in outcomes.values() if isinstance(outcome, tuple)}) == 3  # processes
    function.close()


def test_a_function_that_ends_every_process_is_not_started_for_every_call(tmp_path):
    text = (
        f"import os\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\n"
        + """
def f(what):
    if what == "exit":
        os._exit(3)
    return what
"""
    )
    function = isolated(tmp_path, text)
    for batch in (1, 2):  # the next batch tries again
        outcomes = dict(function.outcomes([{"what": "exit"}] * 30, 10.0, 60.0))
        assert len(outcomes) == 30 and len((tmp_path / "starts").read_text()) == 3 * batch
        assert [outcome.error for outcome in outcomes.values()].count("died: its process ended with code 3") == 3
        assert outcomes[29].error == "was not called: its process died in the first 3 calls, and none has returned"
    # A function that has returned once may have met bad arguments.
    outcomes = dict(function.outcomes([{"what": what} for what in ["right", *["exit"] * 5, "right"]], 10.0, 60.0))
    assert outcomes[0] == outcomes[6] == "right" and outcomes[5].error == "died: its process ended with code 3"
    function.close()


def test_calls_that_wait_for_a_hanging_one_share_the_deadline_of_the_batch(tmp_path):
    function = isolated(tmp_path, WILD)
    function.start()
    outcomes = dict(function.outcomes([{"what": what} for what in ("pid", "swallow", "pid")], 3600.0, 1.0))
    assert isinstance(outcomes[0], tuple)
    assert outcomes[1] == outcomes[2] == DeadlineExceeded(of_batch=True)
    assert isinstance(function("pid"), tuple)
    function.close()


def test_large_arguments_do_not_wait_for_a_hanging_call(tmp_path):
    """Whoever writes to a process that does not read would wait without a limit."""
    function = isolated(tmp_path, WILD)
    function.start()
    calls = [{"what": "compiled"}, *({"what": "pid", "more": "x" * 10**6} for _ in range(20))]
    outcomes = dict(function.outcomes(calls, 3.0, 3600.0))
    assert outcomes.pop(0) == DeadlineExceeded()
    assert all(len(more) == 10**6 for _, more in outcomes.values()) and len(outcomes) == 20
    function.close()


def test_an_argument_that_cannot_be_sent_costs_its_call(tmp_path):
    function = isolated(tmp_path, WILD)
    outcomes = dict(
        function.outcomes([{"what": "pid"}, {"what": (each for each in "ab")}, {"what": "pid"}], 60.0, 60.0)
    )
    assert outcomes[0] == outcomes[2]
    assert outcomes[1].error == "cannot get its arguments in its process: TypeError: cannot pickle 'generator' object"
    function.close()


def test_a_call_in_a_thread_can_be_interrupted_and_its_process_outlives_the_thread(tmp_path):
    function = isolated(tmp_path, WILD)
    with ThreadPoolExecutor(1) as pool:
        pid, _ = pool.submit(function, "pid").result()
    time.sleep(0.2)  # the kernel ends processes with the thread that started them
    assert function("pid") == (pid, 0)

    def limited():
        with time_limit(0.2):
            function("swallow")

    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeLimitExceeded):
        pool.submit(limited).result()
    function.close()


def test_answers_to_an_abandoned_batch_are_not_taken_for_those_of_the_next():
    pool = DeadlinePool(abs, 1)
    outcomes = pool.outcomes([((-number,), {}) for number in range(200)], 60, 60)
    assert next(outcomes) == (0, 0)
    outcomes.close()
    assert pool.map([(-7,), (-8,)], 60, 60) == [7, 8]
    pool.close()


def test_a_new_process_runs_the_code_of_the_first(tmp_path):
    path = tmp_path / "wild.py"
    path.write_text(WILD)
    load = functools.partial(load_extern_type, str(path), "f", path.read_bytes())
    function = IsolatedFunction(load, {}, START_TIMEOUT_S)
    first, _ = function("pid")
    path.write_text("def f(*_, **__): return 'of the next run'\n")
    with pytest.raises(UserCodeFailed, match="code 3"):
        function("exit")
    second, more = function("pid")
    assert more == 0 and second != first
    function.close()


def test_a_process_that_cannot_start_again_ends_the_batch(tmp_path):
    text = "import os, pathlib\nmark = pathlib.Path(__file__).with_name('mark')\n"
    text += "if mark.exists(): raise OSError('address in use')\nmark.touch()\ndef f(**_): os._exit(3)\n"
    function = isolated(tmp_path, text)
    function.start()
    with pytest.raises(ProcessStartError, match="raised .*address in use"):
        list(function.outcomes([{}, {}], 60, 60))
