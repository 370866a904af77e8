"""Captures of a whole process, which the roles in it share, and the folders of what profilers write."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.profiler.ranges import Range, marked_range


class SharedCapture:
    """Counts the roles that use a capture: the first one starts it, the last one stops it."""

    def __init__(self) -> None:
        self._users = 0

    def open(self, start: Callable[[], None]) -> None:
        """Call ``start`` for the first user."""
        if not self._users:
            start()
        self._users += 1

    def close(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` for the last user."""
        self._users -= 1
        if not self._users:
            stop()


class ProcessTool(ABC):
    """A profiler of which a process can run only one: one capture per step, or with ``discrete`` one per task."""

    capture: SharedCapture
    """One for each subclass, because the roles of a process share it."""

    def __init__(self, role: str, discrete: bool) -> None:
        self.role = role
        self.discrete = discrete
        self.profiled_step: int | str | None = None

    @abstractmethod
    def begin(self, role: str) -> None:
        """Start the capture."""

    @abstractmethod
    def end(self) -> None:
        """Stop the capture and write it."""

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step; ``role`` names its capture."""
        self.profiled_step = profile_step
        if not self.discrete:
            self.capture.open(lambda: self.begin(role or self.role))

    def stop(self) -> None:
        """End a step."""
        if not self.discrete:
            self.capture.close(self.end)

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Mark a task, and with ``discrete`` capture it."""
        if self.discrete:
            self.capture.open(lambda: self.begin(role))
        try:
            with marked_range(name, **{key: marks.get(key) for key in ("color", "domain", "category")}):
                yield
        finally:
            if self.discrete:
                self.capture.close(self.end)

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return marked_range(name)

    def step(self) -> None:
        """Do nothing: a capture holds all mini-batches."""
        return None


def save_folder(save_path: str | None) -> Path:
    """Return the folder that all files go to."""
    return Path(save_path or "outputs/profile").expanduser().absolute()


def make_save_folder(save_path: str | None) -> Path:
    """Create the folder that all files go to, early, before a run has anything to lose.

    Raises: ValueError naming the folder.
    """
    folder = save_folder(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"profiler.save_path={folder} cannot be created: {error.strerror}; choose another folder"
        ) from error
    return folder


def step_folder(save_path: str | None, step: int | str | None) -> Path:
    """Return the folder for the files of a step."""
    return save_folder(save_path) / f"step{step}"
