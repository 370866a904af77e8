"""File operations on HDFS and local paths."""

import logging
import os
import shutil
import subprocess
from typing import Any

from verl.errors import WrongInput

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 3600

_Done = subprocess.CompletedProcess[str]


_MISSING = "HDFS paths need the `hdfs` command, which is not installed: install it, or copy to a local path"


class HdfsError(RuntimeError):
    """An ``hdfs`` command failed, timed out, or is not installed."""


class HdfsReadError(HdfsError, WrongInput):
    """A path that the user names cannot be copied from HDFS."""


def exists(path: str, **kwargs: Any) -> bool:
    """Whether ``path`` exists."""
    if not is_hdfs(path):
        return os.path.exists(path)
    return _run(["-test", "-e", path], check=False, **kwargs).returncode == 0


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a folder and its parents; on HDFS an existing folder is never an error."""
    if is_hdfs(name):
        _run(["-mkdir", "-p", name], **kwargs)
    else:
        os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file or a folder from and to local or HDFS paths, and return True.

    Raises: HdfsError when the command fails, HdfsReadError if it reads from HDFS.
    """
    timeout_s = kwargs.pop("timeout", COMMAND_TIMEOUT_S)
    if is_hdfs(src) and is_hdfs(dst):
        _run(["-cp", "-f", src, dst], timeout_s)
    elif is_hdfs(dst):
        _run(["-put", "-f", src, dst], timeout_s)
    elif is_hdfs(src):
        try:
            _run(["-get", src, dst], timeout_s)
        except HdfsError as error:
            raise HdfsReadError(str(error)) from error
    elif os.path.isdir(src):
        shutil.copytree(src, dst, **kwargs)
    else:
        shutil.copy(src, dst, **kwargs)
    return True


def state_of(path: str) -> str | None:
    """Return sizes, times and checksums of the files at a path on HDFS; None if HDFS does not tell."""
    try:
        listing = _run(["-ls", "-R", path]).stdout
        entries = [line.split(maxsplit=7) for line in listing.splitlines()]
        files = [entry[7] for entry in entries if len(entry) == 8 and entry[0].startswith("-")]
        if not files:
            return None
        checksums = _run(["-checksum", *files], check=False)  # some file systems have none
    except HdfsError:
        return None
    return listing + (checksums.stdout if checksums.returncode == 0 else "")


def put_folder(src: str, dst: str) -> None:
    """Replace ``dst`` by a copy of a local folder.

    The copy goes to a temporary name and is renamed, so that ``dst`` is never a half-written folder.

    Raises: HdfsError when a command fails.
    """
    dst = dst.rstrip("/")
    unfinished = f"{dst}.unfinished"
    makedirs(os.path.dirname(dst), exist_ok=True)
    _remove(unfinished)
    copy(src, unfinished)
    _remove(dst)
    if is_hdfs(dst):
        _run(["-mv", unfinished, dst])
    else:
        os.rename(unfinished, dst)


def _remove(folder: str) -> None:
    if is_hdfs(folder):
        _run(["-rm", "-r", "-f", folder])
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_hdfs(path: str) -> bool:
    """Whether ``path`` names a remote file."""
    return str(path).startswith("hdfs://")


def missing_command() -> str | None:
    """Return the advice for a machine without the ``hdfs`` command; None where it exists."""
    return None if shutil.which("hdfs") else _MISSING


def _run(arguments: list[str], timeout: float = COMMAND_TIMEOUT_S, check: bool = True) -> _Done:
    command = [shutil.which("hdfs") or "hdfs", "dfs", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, encoding="utf-8")
    except FileNotFoundError:
        raise HdfsError(f"{next(filter(is_hdfs, arguments))}: {_MISSING}") from None
    except subprocess.TimeoutExpired:
        raise HdfsError(f"`{' '.join(command)}` did not finish within {timeout} s") from None
    if check and done.returncode != 0:
        raise HdfsError(f"`{' '.join(command)}` failed with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done
