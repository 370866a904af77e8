"""What trackers hold of a run, read back with their own libraries: wandb, and others in environments of their own."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from verl.utils.observe.record import read_record
from verl.utils.observe.tracking import numbers_of

REPOSITORY = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("tracked_run.py")
ENVIRONMENTS = REPOSITORY / "outputs" / "trackers"
LARGEST = sys.float_info.max


class Tracker(NamedTuple):
    """How a tracker is set up, and what it does to names and numbers.

    Attributes: ``packages`` are those of its environment, none for that of the tests; ``variables`` send it to the
        working folder; ``resumes`` are the variables with which a later process continues the run ``{id}``, None if it
        makes a new run; ``damaged`` is what breaks it: a folder, or its process; ``only_numbers`` is whether it leaves
        out all else.
    """

    packages: tuple[str, ...]
    variables: dict[str, str]
    resumes: dict[str, str] | None
    damaged: str
    only_numbers: bool = False
    name: Callable[[str], str] = str
    number: Callable[[float], float] = float


def of_sqlite(value: float) -> float:
    return math.copysign(LARGEST, value) if math.isinf(value) else value


RESUMED_WANDB = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "allow"}
TRACKERS = {
    "wandb": Tracker((), {"WANDB_MODE": "offline", "WANDB_DIR": "."} | RESUMED_WANDB, {}, "the process"),
    "mlflow": Tracker(
        ("mlflow==3.17.2",),
        {"MLFLOW_TRACKING_URI": "sqlite:///runs.db"},
        {"MLFLOW_RUN_ID": "{id}"},
        "",
        only_numbers=True,
        number=of_sqlite,
    ),
    "mlflow in files": Tracker(
        ("mlflow==3.17.2",),
        {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
        {"MLFLOW_RUN_ID": "{id}"},
        "mlruns",
        only_numbers=True,
    ),
    "swanlab": Tracker(
        ("swanlab[dashboard]==0.10.3",),
        {"SWANLAB_MODE": "local", "SWANLAB_LOG_DIR": "swanlog"},
        None,
        "swanlog",
        only_numbers=True,
        name=lambda name: name.strip("./"),
    ),
    "trackio": Tracker(("trackio==0.43.0",), {"TRACKIO_DIR": "tio"}, {"TRACKIO_RESUME": "allow"}, "tio"),
}
OF_TRACKERS = ("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_")
ALL = [pytest.param(name, marks=pytest.mark.full if TRACKERS[name].packages else ()) for name in TRACKERS]
BUT_SQLITE = [each for each in ALL if each.values != ("mlflow",)]


def backend_of(name: str) -> str:
    return name.partition(" ")[0]


def python_of(name: str) -> str:
    """Return the Python that has a tracker, in an environment that is made when it is first asked for."""
    packages = TRACKERS[name].packages
    if not packages:
        return sys.executable
    packages += ("numpy", "omegaconf")
    folder = ENVIRONMENTS / backend_of(name)
    python, ready = folder / "bin" / "python", folder / "packages.txt"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not ready.exists() or ready.read_text() != "\n".join(packages):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"pip cannot install {' '.join(packages)}: {done.stderr.strip()[-300:]}")
            ready.write_text("\n".join(packages))
    return str(python)


def call(name: str, folder: Path, variables: dict[str, str], *words: object) -> str:
    """Run the script in a tracker's environment and return its standard output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_TRACKERS)}
    own = {"PYTHONPATH": str(REPOSITORY), "HOME": str(folder), "PYTHONWARNINGS": "ignore"}
    command = [python_of(name), str(SCRIPT), backend_of(name), *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=kept | own | variables, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout


def read(name: str, folder: Path, variables: dict[str, str]) -> list[dict]:
    """Return the runs that a tracker holds: their id, steps, configuration and tables."""
    output = call(name, folder, variables, "read")
    assert "hidden" not in output  # the API key of the configuration
    return json.loads(output.splitlines()[-1])


def equal(found: object, expected: float) -> bool:
    return found == expected or (isinstance(found, float) and math.isnan(found) and math.isnan(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_run_and_its_resume_are_read_back(name, tmp_path):
    """All numbers of ``metrics.jsonl``: odd names, NaN, infinities, booleans; tables; the masked configuration."""
    tracker = TRACKERS[name]
    call(name, tmp_path, tracker.variables, "log", 1, 3)
    (first,) = read(name, tmp_path, tracker.variables)
    resumes = {key: value.format(id=first["id"]) for key, value in (tracker.resumes or {}).items()}
    call(name, tmp_path, tracker.variables | resumes, "log", 3, 4)
    runs = read(name, tmp_path, tracker.variables)
    assert len(runs) == (2 if tracker.resumes is None else 1) and "seed" in str(runs[0]["config"])
    steps = {int(step): numbers_of(found) for run in runs for step, found in run["steps"].items()}
    record = read_record(tmp_path / "record" / "metrics.jsonl")
    assert sorted(steps) == sorted(record) == [1, 2, 3, 4]
    for step, data in record.items():
        expected = {tracker.name(key): tracker.number(v) for key, v in data.items() if isinstance(v, int | float)}
        missing = {key: value for key, value in expected.items() if not equal(steps[step].get(key), value)}
        assert missing == {}, {key: steps[step].get(key) for key in missing}
        if tracker.only_numbers:
            assert steps[step].keys() == expected.keys()
    tables = [json.dumps(table, ensure_ascii=False) for run in runs for table in run["tables"].values()]
    assert len(tables) >= 4 and (name == "swanlab" or all("question ünï <b>" in table for table in tables))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUT_SQLITE)
def test_arrays_are_histograms_where_a_tracker_has_them(name, tmp_path):
    call(name, tmp_path, TRACKERS[name].variables, "log", 1, 1)
    (run,) = read(name, tmp_path, TRACKERS[name].variables)
    step = run["steps"]["1"]
    if TRACKERS[name].only_numbers:
        assert not step.keys() & {"histogram", "short_histogram", "list", "text"}
        return
    values = step["histogram/values"] if name == "wandb" else step["histogram"]["values"]
    assert sum(values) == 100 and step["text"] == "words" and step["list"] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUT_SQLITE)
def test_a_tracker_that_fails_in_the_middle_does_not_end_the_run(name, tmp_path):
    tracker = TRACKERS[name]
    assert "ended" in call(name, tmp_path, tracker.variables, "fail", tracker.damaged)
    record = read_record(tmp_path / "record" / "metrics.jsonl")
    assert record == {step: {"x": step} for step in range(1, 7)}
    if name != "wandb":  # whose process is gone, with what it had not written
        (run,) = read(name, tmp_path, tracker.variables)
        steps = {int(step): found["x"] for step, found in run["steps"].items()}
        assert {5, 6} <= steps.keys() and all(steps[step] == step for step in steps)
