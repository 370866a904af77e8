"""Copy files from HDFS to the local disk and from there to shared memory; read files ahead."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from filelock import FileLock

from verl.utils import hdfs_io

logger = logging.getLogger(__name__)

copy = hdfs_io.copy
exists = hdfs_io.exists
makedirs = hdfs_io.makedirs

SHM_ROOT = "/dev/shm/verl-cache"
RECORD_FILE = ".directory_record.txt"
LOCK_TIMEOUT_S = 3600

_WEIGHT_FILES = ("*.safetensors", "*.bin")

is_non_local = hdfs_io.is_hdfs

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def unreadable_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of a path that blocks or fails when read, such as "is a named pipe"; else None.

    Returns: None for a file that can be read, for a folder, and for a path that does not exist.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)}, which does not exist" if os.path.islink(path) else None
    except OSError as error:
        return (
            "is a link that leads back to itself" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        )
    except ValueError as error:  # a null byte
        return f"is no path: {error}"
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        return f"is {kind}"
    return None if os.access(path, os.R_OK) else "cannot be read: permission denied"


def readable_file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path that can be opened without blocking.

    Raises: OSError saying what the path is if it is no file.
    """
    problem = unreadable_kind(path)
    if problem is not None:
        raise OSError(f"{path} {problem}, not a file")
    return path


def existing_part(path: str) -> str:
    """Return the longest part of an absolute path that exists on this machine."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def md5_encode(path: str) -> str:
    """Return the hexadecimal digest that names a remote path in the cache."""
    return hashlib.md5(path.encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """Return the path of the copy of ``hdfs_path`` under ``cache_dir``."""
    return os.path.join(cache_dir, md5_encode(hdfs_path), os.path.basename(hdfs_path))


def local_mkdir_safe(path: str) -> str:
    """Create a folder, even if several processes do so at once; relative paths start at the working directory."""
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(path, exist_ok=True)
    return path


def verify_copy(src: str, dest: str) -> bool:
    """Whether ``dest`` holds the files of ``src``, compared by name and size."""
    return os.path.exists(src) and os.path.exists(dest) and _listing(src) == _listing(dest)


def copy_to_shm(src: str) -> str:
    """Copy a local file, folder or hub id into shared memory, and return the copy, which is as the source is now.

    A source has one copy. A record next to the copy lists the files that were copied. If the source has changed, it is
    copied again. The result is ``src``, with a warning, if another process still reads the old copy, if the source
    cannot be copied, or if the folder of the copies is not private to this user.
    """
    if not os.path.exists(src):
        from huggingface_hub import snapshot_download

        src = snapshot_download(src)
    src = os.path.abspath(src)
    home = os.path.join(f"{SHM_ROOT}-{os.getuid()}", md5_encode(src))
    target = os.path.join(home, os.path.basename(src))
    try:
        problem = _not_private(os.path.dirname(home))
        if problem is None:
            os.makedirs(home, mode=0o700, exist_ok=True)
            with FileLock(os.path.join(home, ".lock"), timeout=LOCK_TIMEOUT_S):
                problem = _renewed(src, target, Path(home, _SHM_RECORD))
    except OSError as error:  # for instance a dangling link in the folder
        problem = str(error)
    if problem is None:
        return target
    logger.warning("%s is read from disk, not from shared memory: %s", src, problem)
    return src


_SHM_RECORD = ".source.json"
_REMOTE_RECORD = ".source"
_readers: dict[str, int] = {}
"""Copies, each with the file that this process has opened to lock it."""
_read: set[str] = set()
"""The copies that this process reads, and holds a shared lock of until it ends."""


def _not_private(folder: str) -> str | None:
    """Create a folder that only this user can enter; return the reason if that fails."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(folder, mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{folder} is open to other users: write `chmod 700 {folder}`"
    return None


def _renewed(src: str, target: str, record: Path) -> str | None:
    """Update a copy to the state of its source; return the reason if that fails. The caller holds its lock."""
    # The record is written last and removed first, so a copy that was cut short never has one.
    state = _state_of(src)
    if not (record.is_file() and record.read_text(encoding="utf-8") == state and verify_copy(src, target)):
        with _replacing(target) as is_free:
            if not is_free:
                return "it has changed, and another process reads the copy of its old content"
            record.unlink(missing_ok=True)
            _remove(target)
            # Shared memory is taken from the memory of every process, so room is checked before.
            needed = sum(size for _, size in _listing(src))
            free = shutil.disk_usage("/dev/shm").free
            if needed > free:
                return f"it needs {needed} bytes, {free} are free"
            copy_tree = shutil.copytree if os.path.isdir(src) else shutil.copy
            copy_tree(src, target)
            if _state_of(src) != state:
                return "it changed while it was copied"
            record.write_text(state, encoding="utf-8")
    _read_from(target)
    return None


def _read_from(copy: str) -> None:
    """Keep others from replacing a copy until this process ends."""
    # The system takes the lock back however this process ends.
    fcntl.flock(_readers_of(copy), fcntl.LOCK_SH)
    _read.add(copy)


def _readers_of(copy: str) -> int:
    """Return the lock file of a copy, which its readers hold."""
    if copy not in _readers:
        _readers[copy] = os.open(f"{copy}.readers", os.O_CREAT | os.O_RDWR, 0o600)
    return _readers[copy]


@contextlib.contextmanager
def _replacing(copy: str) -> Iterator[bool]:
    """Yield whether no other process reads a copy. The caller holds its lock, so that no process starts reading."""
    # An exclusive lock succeeds only where no other process holds a shared one. It is not awaited: a reader keeps its
    # lock for as long as it runs.
    readers = _readers_of(copy)
    try:
        fcntl.flock(readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if copy in _read:  # the attempt has released the lock
            fcntl.flock(readers, fcntl.LOCK_SH)
        yield False
        return
    _read.discard(copy)
    try:
        yield True
    finally:
        fcntl.flock(readers, fcntl.LOCK_UN)


def _state_of(path: str) -> str:
    """Return size, times of the last change, inode and device of each file as JSON."""
    names = [name for name, _ in _listing(path)]
    found = {name: os.stat(path if name == "." else os.path.join(path, name)) for name in names}
    return json.dumps(
        {
            name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino, each.st_dev]
            for name, each in found.items()
        }
    )


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Return a local path with the content of ``src``; a local path is returned unchanged.

    Raises: ValueError when ``src`` ends with a slash.
    """
    if src.endswith("/"):
        raise ValueError(f"path {src!r} must not end with a slash")
    local = _fetched(src, cache_dir, filelock, verbose, always_recopy) if is_non_local(src) else src
    return copy_to_shm(local) if use_shm else local


def _fetched(src: str, cache_dir: str | None, filelock: str, verbose: bool, always_recopy: bool) -> str:
    """Return an up-to-date copy of a remote path, at the first location where no other process reads an older copy."""
    if cache_dir is None:
        cache_dir = own_folder(os.path.join(tempfile.gettempdir(), f"verl-cache-{os.getuid()}"))
    first = get_local_temp_path(src, cache_dir)
    home = own_folder(os.path.dirname(first))
    with FileLock(os.path.join(home, filelock), timeout=LOCK_TIMEOUT_S):
        state = hdfs_io.state_of(src)  # before the copy: a change during it is noticed next time
        places = _numbered(os.path.join(home, os.path.basename(first)))
        for local in places:
            if always_recopy or not _is_current(local, state):
                # A model that is being read must not change under its reader: the new copy gets another place.
                with _replacing(local) as is_free:
                    if not is_free:
                        logger.warning("%s is copied again: another process reads %s, which is older", src, local)
                        continue
                    if verbose:
                        logger.warning("copying %s to %s", src, local)
                    _copy_from_hdfs(src, local, state)
            _read_from(local)
            _drop_unread(places)
            return local
    raise AssertionError("there is always another place")


def _drop_unread(places: Iterator[str]) -> None:
    """Remove the copies at other locations that no other process reads."""
    for place in itertools.takewhile(os.path.exists, places):
        with _replacing(place) as is_free:
            if is_free:
                Path(f"{place}{_REMOTE_RECORD}").unlink(missing_ok=True)
                _remove(place)


def own_folder(path: str) -> str:
    """Return a folder for this user alone, under another name if someone else has prepared the first."""
    for folder in _numbered(path):
        problem = _not_private(folder)
        if problem is None:
            return folder
        logger.warning("%s: another name is used", problem)
    raise AssertionError("there is always another name")


def _numbered(path: str) -> Iterator[str]:
    """Yield a path, then the same with a number."""
    yield path
    yield from (f"{path}.copy-{number}" for number in itertools.count(2))


def read_ahead(folder: str) -> threading.Thread:
    """Let the system read the weights of a folder into its file cache while this process does other things.

    Nothing is read of a path that is no folder, nor files that would take more than half of the memory that is
    available, since others may need it. On Linux only.

    Returns: the thread that waits for the system.
    """
    thread = threading.Thread(target=_read_ahead, args=(Path(folder),), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(folder: Path) -> None:
    # Whoever loads a file says what is wrong with it. Outside Linux ``sendfile`` writes to sockets only.
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        sizes = {path: path.stat().st_size for name in _WEIGHT_FILES for path in sorted(folder.glob(name))}
        if sum(sizes.values()) > psutil.virtual_memory().available // 2:
            return
        for path, size in sizes.items():
            at = 0
            with open(path, "rb") as file:  # without a copy, and without the interpreter's lock
                while at < size and (sent := os.sendfile(nowhere.fileno(), file.fileno(), at, size - at)):
                    at += sent


copy_local_path_from_hdfs = functools.partial(copy_to_local, use_shm=False)
"""``copy_to_local`` without shared memory."""


def _copy_from_hdfs(src: str, local: str, state: str | None) -> None:
    """Replace ``local`` by a copy of ``src``; a copied folder gets a record of its files."""
    record = Path(f"{local}{_REMOTE_RECORD}")
    record.unlink(missing_ok=True)
    _remove(local)
    copy(src, local)
    if os.path.isdir(local):
        _record_directory_structure(local)
    if state is not None:
        record.write_text(state, encoding="utf-8")
    _copied.add(local)


_copied: set[str] = set()
"""The copies that this process has made; HDFS may not tell whether a source has changed since."""


def _is_current(local: str, state: str | None) -> bool:
    """Whether a cached copy is complete and of the source as it is now. The caller holds the lock of the copy."""
    if not _is_complete(local):
        return False
    if state is None:
        return local in _copied
    record = Path(f"{local}{_REMOTE_RECORD}")
    return record.is_file() and record.read_text(encoding="utf-8") == state


def _listing(path: str) -> list[tuple[str, int]]:
    """Return name and size of each file in a folder, also of linked ones, or of a single file."""
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(at, name) for at, _, names in os.walk(path, followlinks=True) for name in names]
    return sorted((os.path.relpath(file, path), os.path.getsize(file)) for file in files)


def _record_of(folder: str) -> str:
    return "".join(f"{name} {size}\n" for name, size in _listing(folder) if name != RECORD_FILE)


def _record_directory_structure(folder_path: str | os.PathLike[str]) -> str:
    """Write names and sizes of the files in a folder into it, and return the path of this record."""
    record = Path(folder_path, RECORD_FILE)
    record.write_text(_record_of(str(folder_path)), encoding="utf-8")
    return str(record)


def _check_directory_structure(folder_path: str | os.PathLike[str], record_file: str | os.PathLike[str]) -> bool:
    """Whether a folder holds the files of its record, and no others."""
    record = Path(record_file)
    return record.is_file() and record.read_text(encoding="utf-8") == _record_of(str(folder_path))


def _is_complete(local: str) -> bool:
    """Whether a cached copy is complete; a single file always is, a folder is compared with its record."""
    return os.path.isfile(local) or _check_directory_structure(local, os.path.join(local, RECORD_FILE))
