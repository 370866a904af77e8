"""Measure and empty the folder of an untrusted program.

This module uses the standard library only, because the supervisor loads this file without the package.
"""

import os

ENTRY_BYTES = 4096
"""Bytes that a file or a folder counts in addition to its content: it takes an inode and a name."""
MOST_LEVELS = 100


def is_too_full(folder: str, limit_bytes: int) -> bool:
    """Return whether a folder holds more than ``limit_bytes``, or folders that nobody looks into.

    The count stops at the limit. Folders without permissions or nested deeper than ``MOST_LEVELS`` hide what they hold,
    so they exceed every limit.
    """
    total = 0
    waiting = [(folder, 0)]
    while waiting:
        path, level = waiting.pop()
        if level > MOST_LEVELS:
            return True
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, level + 1))
                        total += ENTRY_BYTES
                    else:
                        total += ENTRY_BYTES + _size(entry)
                    if total > limit_bytes:
                        return True
        except (FileNotFoundError, NotADirectoryError):  # the program has just removed it
            continue
        except OSError:  # no permission, or a path that is too long
            return True
    return False


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def empty_folder(folder: str) -> None:
    """Delete everything in a folder, whatever its depth and permissions.

    It goes down by descriptors and up by "..", so that no path grows long, nothing recurses and one descriptor is open.
    """
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        way = [("", _delete_files(handle))]  # the folders from the top to here, with the subfolders that are left
        while True:
            name, subfolders = way[-1]
            if subfolders:
                name = subfolders.pop()
                os.chmod(name, 0o700, dir_fd=handle)
                handle = _go(handle, name)
                way.append((name, _delete_files(handle)))
            elif len(way) > 1:
                handle = _go(handle, "..")
                os.rmdir(name, dir_fd=handle)
                way.pop()
            else:
                return
    finally:
        os.close(handle)


def _go(handle: int, name: str) -> int:
    """Open a folder relative to an open one, and close the latter."""
    reached = os.open(name, os.O_DIRECTORY, dir_fd=handle)
    os.close(handle)
    return reached


def _delete_files(handle: int) -> list[str]:
    """Delete all entries of an open folder except subfolders, and return the names of these."""
    subfolders = []
    for name in os.listdir(handle):
        try:
            os.unlink(name, dir_fd=handle)
        except IsADirectoryError:
            subfolders.append(name)
    return subfolders
