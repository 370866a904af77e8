"""Measure the CPU seconds and the memory of a command and all processes that it starts."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_POLL_S = 0.02
_MEMORY_EVERY_S = 1.0
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError)


class ProcessTree:
    """Sums CPU seconds and memory over a process and all of its descendants, ended ones included."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.peak_rss = self.peak_pss = 0
        self._known: dict[tuple[int, float], psutil.Process] = {}

    def alive(self) -> Iterator[psutil.Process]:
        """Yield the living processes, including orphans that an earlier call saw before their parent ended."""
        found = [self.root]
        with suppress(*_GONE):
            found += self.root.children(recursive=True)
        for process in found:
            with suppress(*_GONE):
                self._known.setdefault((process.pid, process.create_time()), process)
        for key, process in list(self._known.items()):  # an orphan is not among the children, but still counts
            if process.is_running():
                yield process
            else:
                del self._known[key]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds so far by role of the process; an ended process counts towards its parent."""
        sums: dict[str, float] = {}
        for process in self.alive():
            with suppress(*_GONE):
                name = role(process)
                # The first four are user and system time, of the process and of its ended children.
                sums[name] = sums.get(name, 0.0) + sum(process.cpu_times()[:4])
        return sums

    def note_memory(self) -> dict[str, int]:
        """Update the peaks of resident memory; RSS counts a shared page once per process, PSS once in total.

        Returns: the current PSS in bytes: private memory by role of the process, and over all processes ``shared
            memory`` (mostly Ray's object store) and ``files`` (mostly code).
        """
        rss = 0
        sums = {"shared memory": 0, "files": 0}
        for process in self.alive():
            with suppress(*_GONE):
                rss += process.memory_info().rss
                anonymous, shared, files = _proportional(process.pid)
                name = role(process)
                sums[name] = sums.get(name, 0) + anonymous
                sums["shared memory"] += shared
                sums["files"] += files
        self.peak_rss, self.peak_pss = max(self.peak_rss, rss), max(self.peak_pss, sum(sums.values()))
        return sums


def _proportional(pid: int) -> list[int]:
    """Return the PSS of a process in bytes, split into private memory, shared memory and mapped files."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, text.splitlines()[1:])}
    return [sizes[f"Pss_{kind}:"] for kind in ("Anon", "Shmem", "File")]


def role(process: psutil.Process) -> str:
    """Return the role of a process: the title ``ray::Class.method`` of a Ray worker, or the name of a script."""
    title, *arguments = process.cmdline() or [process.name()]
    if title.startswith("ray::"):
        return title.removeprefix("ray::").partition(".")[0]
    if Path(title).name.startswith("python"):
        title = next((text for text in arguments if not text.startswith("-")), title)
    return Path(title).name


def run_measured(
    command: list[str], env: dict[str, str], progress: Path, log: Path, timeout_s: float
) -> dict[str, Any]:
    """Run a command that appends a line to the file ``progress`` after each step; measure whenever a line appears.

    Returns: ``marks``, a list of (seconds, {role: CPU seconds}) with one entry per line; ``pss_at_marks``, a list of
        {role: bytes}; and the peaks of memory.
    Raises: RuntimeError with the end of the log if the command fails or takes longer than ``timeout_s``.
    """
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        tree = ProcessTree(child.pid)
        marks = []
        pss = []
        memory_at = 0.0
        try:
            while child.poll() is None:
                now = time.monotonic()
                if now - started > timeout_s:
                    raise RuntimeError(f"no end after {timeout_s} s: {command}\n{_tail(log)}")
                if progress.exists() and progress.read_bytes().count(b"\n") > len(
                    marks
                ):  # count line ends, since a line may be written in pieces
                    marks.append((now - started, tree.cpu_seconds()))
                    pss.append(tree.note_memory())
                elif now > memory_at:
                    memory_at = now + _MEMORY_EVERY_S
                    tree.note_memory()
                time.sleep(_POLL_S)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(timeout=60)
    if child.returncode:
        raise RuntimeError(f"exit {child.returncode}: {command}\n{_tail(log)}")
    return {"marks": marks, "pss_at_marks": pss, "peak_rss": tree.peak_rss, "peak_pss": tree.peak_pss}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace", encoding="utf-8").splitlines()[-30:])
