"""What a person sees of a run while it goes on: a bar on a terminal, one line per step elsewhere."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from verl.utils import envs
from verl.utils.console import get_console

MODES = ("bar", "lines", "off")


class Progress:
    """Show step, reward, validation, tokens per second and the time left.

    ``VERL_PROGRESS`` is ``bar``, ``lines`` or ``off``; the launching process sets it by whether it has a terminal,
    since the trainer itself runs in a Ray actor. There a bar is drawn by Ray's own, in the launching process.
    """

    def __init__(self, total_steps: int, start_step: int) -> None:
        """Expect steps ``start_step + 1`` to ``total_steps``."""
        self.mode = envs.read("VERL_PROGRESS", "lines")
        if self.mode not in MODES:
            raise ValueError(f"environment variable VERL_PROGRESS={self.mode!r} must be one of {MODES}")
        self.total, self.start, self.validation = total_steps, start_step, ""
        self.started = time.monotonic()
        self.bar = None
        if self.mode == "bar":
            from ray.experimental import tqdm_ray

            self.bar = tqdm_ray.tqdm(total=total_steps, desc="training", unit="step", flush_interval_s=0.0)
            self.bar.update(start_step)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Remember the latest validation."""
        values = [value for key, value in metrics.items() if key.startswith("val-core/")]
        if values:
            self.validation = f"{sum(values) / len(values):.3f}"

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self.note(metrics)
        text = self._describe(metrics)
        if self.bar is not None:
            self.bar.set_description(text)
            self.bar.update(1)
        elif self.mode == "lines":
            done = step - self.start
            left = (time.monotonic() - self.started) / done * (self.total - step) if done > 0 else 0.0
            seconds = metrics.get("timing_s/step", 0.0)
            get_console().info(
                "step %d/%d | %s | %.2f s | %s left", step, self.total, text, seconds, timedelta(seconds=round(left))
            )

    def _describe(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"reward {metrics['critic/score/mean']:.3f}"] if "critic/score/mean" in metrics else []
        if self.validation:
            parts.append(f"validation {self.validation}")
        if metrics.get("perf/time_per_step"):
            parts.append(f"{metrics['perf/total_num_tokens'] / metrics['perf/time_per_step']:,.0f} tokens/s")
        return " | ".join(parts)

    def close(self) -> None:
        """End the display."""
        if self.bar is not None:
            self.bar.close()
