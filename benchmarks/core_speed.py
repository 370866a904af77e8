"""A clock that is independent of the core's speed, for benchmarks in a virtual machine.

Other guests may use the same core, which a virtual machine cannot see: the same work may take 1.7 times the CPU seconds
from one second to the next. ``SteadyClock`` runs a fixed probe every few milliseconds, and scales CPU seconds by how
long the probe took.
"""

import signal
import time
from types import TracebackType
from typing import Any

import numpy as np

PROBE_S = 200e-6
"""CPU seconds of a probe at the nominal speed, in whose seconds the steady clock counts."""
INTERVAL_S = 10e-3
"""Interval between two probes, in CPU seconds summed over all threads."""
_NUMBERS = np.random.default_rng(0).integers(0, 1 << 20, 2000)


def probe() -> float:
    """Run small operations of Python and numpy, whose code and data fit into the cache; return their CPU seconds."""
    for _ in range(2):
        began = time.thread_time()
        np.argsort(_NUMBERS[:1500], kind="stable")
        np.unique(_NUMBERS[:500])
        for start in range(60):
            _NUMBERS[start : start + 40].sum()
    return time.thread_time() - began


class SteadyClock:
    """Counts CPU seconds of this process, scaled to the speed at which ``probe`` takes ``PROBE_S``, without the probes.

    Use it as a context manager in the main thread; the process must not start other processes within. The scale is
    right for work like the probe's; another guest on the core slows down copies of large memory less.

    Attributes:
        spent: CPU seconds of the probes so far.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._probed = 0.0
        self._steady = 0.0
        self._since = 0.0
        self._busy = False

    def __enter__(self) -> "SteadyClock":
        self._handler = signal.signal(signal.SIGPROF, self._tick)
        self._tick()
        self._steady = 0.0
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._handler)

    def now(self) -> float:
        """Return the scaled CPU seconds so far."""
        while True:
            since = self._since
            steady = self._steady + (time.process_time() - since) * PROBE_S / self._probed
            if since == self._since:  # no probe ran during the call
                return steady

    def _tick(self, *_: Any) -> None:
        if self._busy:  # this signal came while the probe of the previous one ran
            return
        self._busy = True
        began = time.process_time()
        before = self._probed
        self._probed = probe()
        # The speed since the previous probe is taken as the mean of the speeds that both probes show.
        self._steady += (began - self._since) * PROBE_S / ((before + self._probed) / 2)
        self._since = time.process_time()
        self.spent += self._since - began
        self._busy = False
