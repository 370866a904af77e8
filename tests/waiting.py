"""Wait for what a test expects, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Far more than anything takes that happens at all, and less than a test may take."""


def wait_until(condition: Callable[[], object], pause_s: float = 0.02) -> None:
    """Return as soon as the condition holds.

    Raises: AssertionError if it does not hold after ``PATIENCE_S``.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it has not happened within {PATIENCE_S:g} s"
        time.sleep(pause_s)
