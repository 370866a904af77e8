"""Captures of a whole process, which the roles in it share, and the folders of what profilers write."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

from verl.utils.profiler.ranges import Range, marked_range


class Tool:
    """Captures one role on one rank; a subclass does what its tool supports, and nothing for the rest."""

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step; ``role`` names a capture of the whole process."""

    def stop(self) -> None:
        """End a step and write its capture."""

    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Range:
        """Capture a task of the step; one with ``mini_batches`` calls ``step`` after each."""
        return nullcontext()

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return nullcontext()

    def step(self) -> None:
        """Note the end of a mini-batch."""


class ProcessTool(Tool, ABC):
    """A profiler of which a process can run only one: one capture per step, or with ``discrete`` one per task.

    The roles of a process share a capture: the first one that uses it starts it, the last one stops it.
    """

    users: ClassVar[int] = 0
    """Roles that use the capture now, by subclass."""

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
            self._open(role or self.role)

    def stop(self) -> None:
        """End a step."""
        if not self.discrete:
            self._close()

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Mark a task, and with ``discrete`` capture it."""
        if self.discrete:
            self._open(role)
        try:
            with marked_range(name, **{key: marks.get(key) for key in ("color", "domain", "category")}):
                yield
        finally:
            if self.discrete:
                self._close()

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return marked_range(name)

    def _open(self, role: str) -> None:
        if not self.users:
            self.begin(role)
        type(self).users += 1

    def _close(self) -> None:
        type(self).users -= 1
        if not self.users:
            self.end()


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
