"""What a process can have only one of: roles that share it take turns, or share it."""

from collections.abc import Callable
from pathlib import Path


class SharedCapture:
    """A capture of the whole process, open from the first role that asks for it to the last."""

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


def save_folder(save_path: str | None) -> Path:
    """Return where all files go."""
    return Path(save_path or "outputs/profile").expanduser().absolute()


def make_save_folder(save_path: str | None) -> Path:
    """Make the folder of all files, before there is anything to lose.

    Raises: ValueError naming the folder.
    """
    folder = save_folder(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"profiler.save_path={folder}: cannot be made: {error.strerror}, write another") from error
    return folder


def step_folder(save_path: str | None, step: object) -> Path:
    """Return where the files of a step go."""
    return save_folder(save_path) / f"step{step}"
