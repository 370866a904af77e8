"""How a wrong input is made and tried: the folder of a case, its command, its answer, and whether that is clear."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.base_config import PROBLEM

from .conftest import REPOSITORY, Workspace
from .launcher import HUNG, REACHED_RAY

USAGE_ERROR = 2
MOST_LINES = 5
VERDICTS = ("clear", "unclear", "hung", "accepted")
INSTEAD = re.compile(
    r"\b(must|write|name|(?<!data )set|use|add|keep|give|raise|lower|copy|correct|install|define|save|leave|choose|"
    r"start|resume|remove|rename|unset|download|nearest|known are|it has|the file has|one of|needs|excludes)\b"
)
"""Words with which a message says what would be right."""

Overrides = Mapping[str, Any]
Words = Overrides | Sequence[str]
"""Keys with their values, or the words of a command without keys."""


@dataclass(frozen=True)
class Place:
    """Where the files of a case go, and what there is to start from."""

    folder: Path
    workspace: Workspace


@dataclass(frozen=True)
class Case:
    """A wrong input.

    ``make`` writes its files and returns overrides of the smallest run of its command; one whose value is ``ABSENT`` is
    left out. ``says`` are parts of the message: the key, file or row, and the value, with ``{at}`` for the folder of
    the case. Cases that only workers or code of the user can find are ``late``: ``alone`` where the run does not get as
    far as its first step, else ``together``.
    """

    group: str
    name: str
    make: Words | Callable[[Place], Words]
    says: tuple[str, ...]
    late: str = ""
    command: str = "verl.trainer.main_ppo"
    environment: Mapping[str, str] = field(default_factory=dict)

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


# ---- the verdict


def verdict(case: Case, answer: Answer) -> tuple[str, str]:
    """Return one of ``VERDICTS`` for an answer, and what is wrong with one that is not clear.

    Clear is: exit code 2, at most five lines besides those of a list of problems, no stack trace, the place and value
    of the mistake, and what to write instead.
    """
    if answer.code == HUNG:
        return "hung", "had to be ended"
    if answer.code in (0, REACHED_RAY):
        return "accepted", answer.output[-300:]
    lines = [line for line in answer.output.splitlines() if line.strip() and not line.startswith(PROBLEM)]
    faults = []
    if answer.code != USAGE_ERROR:
        faults.append(f"exit code {answer.code}")
    if len(lines) > MOST_LINES:
        faults.append(f"{len(lines)} lines")
    if "Traceback" in answer.output or '  File "' in answer.output:
        faults.append("a stack trace")
    missing = [part for part in case.says if part.replace("{at}", str(answer.folder)) not in answer.output]
    faults += [f"does not say {part!r}" for part in missing]
    if not INSTEAD.search(answer.output):
        faults.append("does not say what to write instead")
    return ("unclear", f"{'; '.join(faults)}: {answer.output[-600:]}") if faults else ("clear", "")


# ---- the commands


def words(case: Case, place: Place) -> list[str]:
    """Write the files of a case and return the words of its command line."""
    place.folder.mkdir(parents=True, exist_ok=True)
    chosen = case.make(place) if callable(case.make) else case.make
    if not isinstance(chosen, Mapping):
        return [word.replace("{at}", str(place.folder)) for word in chosen]
    base = BASES[case.command.rpartition(".")[2]](place.workspace)
    merged = base | {"trainer.default_local_dir": place.folder / "run"} | dict(chosen)
    if case.command.endswith(("main_generation", "main_eval")):
        merged.pop("trainer.default_local_dir")
    if case.command.endswith("main_generation"):
        merged.setdefault("data.output_path", place.folder / "generated" / "out.parquet")
    found = [f"{key}={_word(value)}" for key, value in merged.items() if value is not ABSENT]
    found = [word.removesuffix("=") if word.startswith(("~", "--check")) else word for word in found]
    return sorted(found, key=lambda word: not word.startswith("--"))  # flags come before keys


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _supervised(workspace: Workspace, model_key: str, **files: str) -> dict[str, Any]:
    paths = {f"data.{key}": workspace.folder / name for key, name in files.items()}
    return {model_key: workspace.model, "data.train_batch_size": 8, "trainer.device": "cpu"} | paths


def _sft(workspace: Workspace) -> dict[str, Any]:
    return _supervised(workspace, "model.path", train_files="conversations.parquet")


def _older_sft(workspace: Workspace) -> dict[str, Any]:
    return _supervised(workspace, "model.partial_pretrain", train_files="pairs.parquet", val_files="pairs.parquet")


def _generation(workspace: Workspace) -> dict[str, Any]:
    return {
        "model.path": workspace.model,
        "data.path": workspace.folder / "train.parquet",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "rollout.prompt_length": 48,
        "rollout.response_length": 16,
    }


BASES: dict[str, Callable[[Workspace], dict[str, Any]]] = {
    "main_ppo": lambda workspace: workspace.overrides("none"),
    "main_dapo": lambda workspace: workspace.overrides("none"),
    "sft_trainer": _sft,
    "fsdp_sft_trainer": _older_sft,
    "main_generation": _generation,
    "main_eval": lambda workspace: {"data.path": workspace.folder / "answers.parquet"},
}
"""The smallest command of each entry point that takes keys."""


# ---- attempts


class LateRuns:
    """All cases that only a run can find, tried in one launch in the background."""

    def __init__(self, cases: Sequence["Case"], workspace: Workspace, folder: Path) -> None:
        self._root = folder
        self._answers: dict[str, Answer] = {}
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

    def answer(self, case: Case, timeout_s: float = 800) -> Answer:
        """Return the answer to a case, when all have been tried."""
        if not self._answers:
            assert self._process.wait(timeout=timeout_s) == 0, (self._root / "output.txt").read_text()[-4000:]
            said: dict[str, tuple[int, str]] = json.loads((self._root / "messages.json").read_text())
            self._answers = {name: Answer(code, text, self._folders[name]) for name, (code, text) in said.items()}
        return self._answers[case.id]

    def __enter__(self) -> "LateRuns":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Launcher:
    """Tries commands up to where Ray would start, in forks of one process that has imported ``modules`` as well."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.special_e2e.launcher", *modules],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: Case, place: Place) -> Answer:
        """Write the files of a case and run its command in its folder."""
        line = words(case, place)
        environment = {name: value.replace("{at}", str(place.folder)) for name, value in case.environment.items()}
        if "VERL_USE_EXTERNAL_MODULES" in environment:  # read when the package is imported
            return run_alone(case.command, line, place.folder, environment)
        output = place.folder / "output.txt"
        request = {
            "command": case.command,
            "words": line,
            "folder": str(place.folder),
            "output": str(output),
            "environment": environment,
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        return Answer(reply["code"], output.read_text(errors="replace"), place.folder)

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def run_alone(command: str, line: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Answer:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", command, *line],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
    )
    return Answer(done.returncode, done.stdout + done.stderr, folder)
