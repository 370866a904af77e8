r"""Score mathematical answers with the library math-verify, which extracts, parses and compares them by algebra.

The limit of a comparison is CPU time, so that its verdict does not depend on how busy the machine is.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl.utils.reward_score import MATH

CPU_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.1
_ALARM_S = 3600  # limit of math-verify itself, in wall time; without one it warns


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """Return 1 if the answer is equivalent to the ground truth, 0 if not, ``timeout_score`` after ``CPU_LIMIT_S``.

    The limit holds in the main thread, where the reward managers call this.

    Raises: MissingPackage without math-verify; ValueError for a ground truth without an answer.
    """
    MATH.require("math_verify")
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    try:
        with _cpu_limit(CPU_LIMIT_S) as alarm_s:
            truth = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=alarm_s)
            answer = parse(model_output, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=alarm_s)
            is_equal = verify(truth, answer, timeout_seconds=alarm_s)
    except TimeoutException:
        return timeout_score
    if not truth:
        raise ValueError(f"math-verify finds no answer in the ground truth {ground_truth!r}")
    return float(is_equal)


def equal(one: str, other: str) -> bool:
    """Return whether math-verify takes two LaTeX expressions for equal; False where it cannot tell in ``CPU_LIMIT_S``.

    The limit holds in the main thread; in other threads only the caller's limit does.

    Raises: MissingPackage without math-verify.
    """
    MATH.require("prime_math")
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    try:
        with _cpu_limit(CPU_LIMIT_S) as alarm_s:
            parsed = [
                parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=alarm_s) for text in (one, other)
            ]
            # 30 digits: 0.333333333333 is not 1/3
            return all(parsed) and bool(
                verify(*parsed, float_rounding=30, numeric_precision=60, timeout_seconds=alarm_s)
            )
    except TimeoutException:
        return False


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[int | None]:
    """Raise math-verify's TimeoutException in the body, and after it, when the main thread has used so much CPU time.

    The timer counts all threads, so the handler asks for the time of this one. The signal comes again, because
    math-verify goes on after an exception. Yield the limit to pass to math-verify.
    """
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    due = time.thread_time() + seconds

    def look(number: int, frame: FrameType | None) -> None:
        if time.thread_time() >= due:
            raise TimeoutException(f"more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _LOOK_EVERY_S)
    try:
        yield _ALARM_S
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # a last signal may interrupt the line above
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
    if time.thread_time() >= due:
        raise TimeoutException(f"more than {seconds:g} s of CPU time")
