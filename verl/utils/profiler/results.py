"""After the last profiled step, gather the files of other nodes and run the user's command."""

import logging
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from verl.utils import envs

logger = logging.getLogger(__name__)

_LAST_LINES = 5


def files_of_this_process(folder: Path) -> dict[str, int]:
    """Return the files below a folder that were written since this process began, and their sizes in bytes."""
    since_s = psutil.Process().create_time()
    found = {str(path.relative_to(folder)): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: stat.st_size for name, stat in found.items() if stat.st_mtime >= since_s}


def missing_files(folder: Path, of_ranks: Iterable[dict[str, int]]) -> dict[int, list[str]]:
    """Return the files that a folder lacks, by rank; the first rank gives a file that several have."""
    wanted: dict[int, list[str]] = {}
    seen: set[str] = set()
    for rank, sizes in enumerate(of_ranks):
        for name, size in sizes.items():
            path = folder / name
            if name not in seen and not (path.is_file() and path.stat().st_size == size):
                wanted.setdefault(rank, []).append(name)
            seen.add(name)
    return wanted


def keep_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files below a folder; each appears only when it is complete.

    Raises: OSError if one cannot be written.
    """
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(content)
        os.replace(part, path)


def run_command(command: str, folder: Path, rank: int) -> None:
    """Run a shell command in the folder of the profiles; a failure is logged, and does not end the run.

    The command gets the rank as ``VERL_PROFILE_RANK`` and the folder as ``VERL_PROFILE_PATH``.
    """
    variables = {**envs.mapping(), "VERL_PROFILE_RANK": str(rank), "VERL_PROFILE_PATH": str(folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=variables, capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        logger.warning("global_profiler.finish_hook_cmd could not run on rank %d: %s", rank, error)
        return
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:]
        logger.warning(
            "global_profiler.finish_hook_cmd ended with %d on rank %d, and the run continues: %s",
            *(done.returncode, rank, " | ".join(lines)),
        )
