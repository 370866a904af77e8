"""The speed of the core while a benchmark runs on it, where other guests of the machine may use the same core.

A virtual machine cannot see them: what a process does may take 1.7 times the CPU seconds from one second to the next.
``SteadyClock`` runs a fixed probe every few milliseconds and counts seconds at a fixed speed of it.
"""

import signal
import time
from types import TracebackType
from typing import Any

import numpy as np

PROBE_S = 200e-6
"""Seconds that a probe takes at the speed of which a steady clock counts the seconds."""
INTERVAL_S = 10e-3
"""CPU seconds of all threads between two probes."""
_NUMBERS = np.random.default_rng(0).integers(0, 1 << 20, 2000)


def probe() -> float:
    """Return the CPU seconds of small operations of Python and numpy, whose code and data are in the cache."""
    for _ in range(2):
        began = time.thread_time()
        np.argsort(_NUMBERS[:1500], kind="stable")
        np.unique(_NUMBERS[:500])
        for start in range(60):
            _NUMBERS[start : start + 40].sum()
    return time.thread_time() - began


class SteadyClock:
    """CPU seconds of this process at the speed at which ``probe`` takes ``PROBE_S``, without those of the probes.

    Used as a context in the main thread of a process that starts no other one meanwhile. It fits work like that of the
    probe: copies of large memory are slowed down less by what shares the core.

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
        """Return the steady seconds so far."""
        while True:
            since = self._since
            steady = self._steady + (time.process_time() - since) * PROBE_S / self._probed
            if since == self._since:  # no probe ran meanwhile
                return steady

    def _tick(self, *_: Any) -> None:
        if self._busy:  # the next signal came during the probe
            return
        self._busy = True
        began = time.process_time()
        before = self._probed
        self._probed = probe()
        # the seconds since the probe before are taken for those of a core between both speeds
        self._steady += (began - self._since) * PROBE_S / ((before + self._probed) / 2)
        self._since = time.process_time()
        self.spent += self._since - began
        self._busy = False
