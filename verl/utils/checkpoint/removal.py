"""Removal of checkpoints and of the leftovers of killed saves. Needs no torch.

A save puts a mark into its folder before anything else: a file that names the folder, and on which the process of the
save holds a lock of the operating system. It removes the mark when all parts are there. A removal does the same. The
system takes the lock back when a process ends, however it ends: if the lock can be taken, nobody goes on with the save
or the removal. A folder without a mark, or with one that was copied from another folder, is not touched.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.utils.checkpoint import files
from verl.utils.checkpoint.files import StrPath

MARK_NAME = ".saving"


class SaveMark:
    """The mark of a folder that this process fills or empties; the folder is made if it does not exist."""

    def __init__(self, folder: StrPath) -> None:
        files.make_folder(folder)
        self.folder = Path(folder)
        self._path = self.folder / MARK_NAME
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without the lock or the mark, no process will remove the folder
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._handle, _content_of(self._path), 0)

    def remove(self) -> None:
        """Remove the mark."""
        self._path.unlink(missing_ok=True)
        os.close(self._handle)


def _content_of(mark: Path) -> bytes:
    return os.fsencode(mark.parent.resolve())


def remove_checkpoint(path: StrPath) -> None:
    """Remove a folder, manifests first, so that no half-removed folder looks complete, and its mark last.

    A link to a folder goes together with the folder. An entry that cannot be removed stays.
    """
    folder = Path(path).resolve()
    with suppress(OSError):  # ranks of one node may do this at once
        for manifest in folder.glob("manifest_world_size_*.json"):
            manifest.unlink(missing_ok=True)
        mark = SaveMark(folder)
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != MARK_NAME:
                child.unlink(missing_ok=True)
        mark.remove()
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.islink(path):
        os.unlink(path)


def remove_leftovers(root: StrPath) -> list[Path]:
    """Remove the leftovers of killed saves and removals below ``root``; return the partial folders among them.

    Links are not followed: they may lead to the folders of another run.
    """
    folders = [folder for _, folder in files.step_folders(root) if not folder.is_symlink()]
    for folder in (Path(root), *folders):
        files.remove_unfinished(folder)
    marks = [mark for folder in folders for mark in (folder / MARK_NAME, *folder.glob(f"*/{MARK_NAME}"))]
    return [mark.parent for mark in marks if not mark.parent.is_symlink() and _is_removed_by(mark)]


def _is_removed_by(mark: Path) -> bool:
    """Remove the partial folder of a mark, or only the mark if the folder is complete; return whether that is gone."""
    with _lock_of(mark) as handle:
        content = _content_of(mark)
        if handle is None or os.pread(handle, len(content) + 1, 0) != content:
            return False
        if files.is_complete(mark.parent):
            mark.unlink()
            return False
        remove_checkpoint(mark.parent)
        return not mark.parent.exists()


@contextmanager
def _lock_of(path: Path) -> Iterator[int | None]:
    """Hold the lock of a file in the block; yield its handle, None if another process has the lock or there is no file.

    Files that the block cannot remove stay.
    """
    handle = None
    has_lock = False
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_lock = True
    try:
        yield handle if has_lock else None
    finally:
        if handle is not None:
            os.close(handle)
