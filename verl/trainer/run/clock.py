"""Time the parts of a start, from launch to the end of the first step."""

import time

from verl.utils.observe.console import get_console


class StartupClock:
    """Seconds between named moments, over the launching process and the trainer's.

    Moments are wall-clock times, since two processes share them; each has the name of the part that ends there.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[str, float]] = []
        self.reported = False

    def mark(self, name: str, at: float | None = None) -> None:
        """Record that part ``name`` ended now, or at a unix time; ignored after the report."""
        if not self.reported:
            self.moments.append((name, time.time() if at is None else at))

    def report(self) -> dict[str, float]:
        """Show the seconds of each part of the start; return them as ``timing_s/startup/<part>`` at the first call."""
        spans: dict[str, float] = {}
        if self.moments and not self.reported:
            for (_, start), (name, end) in zip(self.moments, self.moments[1:], strict=False):
                spans[name] = spans.get(name, 0.0) + end - start
            spans["total"] = self.moments[-1][1] - self.moments[0][1]
            parts = ", ".join(f"{name} {value:.1f}" for name, value in spans.items() if name != "total")
            get_console().info("launch to the end of the first step: %.1f s (%s)", spans["total"], parts)
        self.reported = True
        return {f"timing_s/startup/{name}": value for name, value in spans.items()}


CLOCK = StartupClock()
"""The clock of this process."""
