"""NVIDIA Nsight Systems. ``nsys`` wraps the process; here its captures are started and stopped, and ranges marked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from verl.utils.profiler.captures import SharedCapture
from verl.utils.profiler.config import NsightToolConfig
from verl.utils.profiler.ranges import marked_range

_capture = SharedCapture()


class NsightSystemsProfiler:
    """One capture from ``start`` to ``stop``, or with ``discrete`` one for each task."""

    def __init__(self, options: NsightToolConfig) -> None:
        self.discrete = options.discrete

    def start(self, role: str | None = None, profile_step: Any = None) -> None:
        """Begin a step."""
        if not self.discrete:
            _capture.open(torch.cuda.profiler.start)

    def stop(self) -> None:
        """End a step; nsys writes its database."""
        if not self.discrete:
            _capture.close(torch.cuda.profiler.stop)

    @contextmanager
    def task(self, name: str, role: str, **options: Any) -> Iterator[None]:
        """Mark a task, and with ``discrete`` capture it."""
        marks = {key: options.get(key) for key in ("color", "domain", "category")}
        if self.discrete:
            _capture.open(torch.cuda.profiler.start)
        try:
            with marked_range(name, **marks):
                yield
        finally:
            if self.discrete:
                _capture.close(torch.cuda.profiler.stop)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark a part of a task."""
        return marked_range(name)

    def step(self) -> None:
        """Do nothing: a capture holds all mini-batches."""
