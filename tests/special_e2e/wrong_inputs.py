"""How a wrong input is made and tried: the folder of a case, the commands, and what they answer."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conftest import REPOSITORY, Workspace

GROUPS = ("config", "data", "reward", "checkpoint", "model")
USAGE_ERROR, FAILED_RUN = 2, 1
Overrides = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where the files of a case go, and what there is to start from."""

    folder: Path
    workspace: Workspace


@dataclass(frozen=True)
class Case:
    """A wrong input.

    ``make`` writes its files and returns overrides of the smallest run; one whose value is ``ABSENT`` is left out.
    ``says`` are parts of the message, with ``{at}`` for the folder of the case. Cases that only workers or code of the
    user can find are ``late``: ``alone`` where the run does not get as far as its first step, else ``together``.
    """

    group: str
    name: str
    make: Overrides | Callable[[Place], Overrides]
    says: tuple[str, ...]
    late: str = ""

    @property
    def id(self) -> str:
        return f"{self.group}: {self.name}"


ABSENT = object()


@dataclass(frozen=True)
class Answer:
    """What a command says, and the exit code that it ends with."""

    code: int
    output: str
    folder: Path

    @property
    def message(self) -> str:
        """The output from the first line of the message, without the folder of the case."""
        lines = self.output.strip().splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith(("error in the configuration", "Error:"))]
        return "\n".join(lines[starts[0] :] if starts else lines)


def words(case: Case, place: Place) -> list[str]:
    """Write the files of a case and return the words of its command line."""
    place.folder.mkdir(parents=True, exist_ok=True)
    chosen = case.make(place) if callable(case.make) else case.make
    merged = place.workspace.overrides("none") | {"trainer.default_local_dir": place.folder / "run"} | dict(chosen)
    found = [f"{key}={_word(value)}" for key, value in merged.items() if value is not ABSENT]
    return sorted(found, key=lambda word: not word.startswith("--"))  # flags come before keys


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class LateRuns:
    """All cases that only a run can find, tried in one launch in the background."""

    def __init__(self, cases: Sequence["Case"], workspace: Workspace, folder: Path) -> None:
        self._root, self._messages = folder, {}
        self._folders = {case.id: folder / str(number) for number, case in enumerate(cases)}
        commands: dict[str, dict[str, list[str]]] = {"alone": {}, "together": {}}
        for case in cases:
            commands[case.late][case.id] = words(case, Place(self.folder(case), workspace))
        (folder / "cases.json").write_text(json.dumps(commands))
        base = words(Case("", "", {}, ()), Place(folder / "base", workspace))
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.special_e2e.late_runs", str(folder / "cases.json"), *base],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | workspace.preloaded_workers,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def folder(self, case: Case) -> Path:
        """Return the folder of a case."""
        return self._folders[case.id]

    def message(self, case: Case, timeout_s: float = 420) -> str:
        """Return the message of a case, when all have been tried."""
        if not self._messages:
            assert self._process.wait(timeout=timeout_s) == 0, (self._root / "output.txt").read_text()[-4000:]
            self._messages = json.loads((self._root / "messages.json").read_text())
        return self._messages[case.id]

    def __enter__(self) -> "LateRuns":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Launcher:
    """Tries command lines up to where Ray would start, in forks of one process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.special_e2e.launcher"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: Iterable[str], folder: Path) -> Answer:
        """Run a command in a folder."""
        output = folder / "output.txt"
        request = {"words": list(command), "folder": str(folder), "output": str(output)}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        return Answer(reply["code"], output.read_text(), folder)

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)
