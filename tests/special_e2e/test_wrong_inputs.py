"""Wrong inputs, and the message that each gets from ``python -m verl.trainer.main_ppo``.

The table is ``wrong_input_cases.py``; ``docs/errors.md`` shows it with the messages, and is written anew by
``python -m tests.special_e2e.errors_page``.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Workspace
from .errors_page import PAGE, row_of
from .wrong_input_cases import CASES
from .wrong_inputs import FAILED_RUN, GROUPS, USAGE_ERROR, Answer, Case, LateRuns, Launcher, Place, words

EARLY, LATE = [case for case in CASES if not case.late], [case for case in CASES if case.late]
MOST_LINES = 40


def by_id(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


@pytest.fixture(scope="module", autouse=True)
def late_runs(request: pytest.FixtureRequest) -> Iterator[LateRuns | None]:
    """The launch of all late cases, beside the tests of the others; none where no late case is asked for."""
    if not any(getattr(item, "originalname", "") == "test_refused_by_the_run" for item in request.session.items):
        yield None
        return
    folder = request.getfixturevalue("tmp_path_factory").mktemp("late")
    with LateRuns(LATE, request.getfixturevalue("workspace"), folder) as runs:
        yield runs


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def assert_says(case: Case, message: str, folder: Path) -> None:
    """Hold a message to what the table asks of it, and to a length that a person reads."""
    for part in case.says:
        assert part.replace("{at}", str(folder)) in message, message
    assert "Traceback" not in message and '  File "' not in message
    assert len(message.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("case", EARLY, ids=lambda case: case.id)
def test_refused_before_ray(case: Case, launcher: Launcher, workspace: Workspace, tmp_path: Path) -> None:
    """The launching process ends with code 2, before it would have started Ray, and without having imported torch."""
    answer = launcher.run(words(case, Place(tmp_path, workspace)), tmp_path)
    assert answer.code == USAGE_ERROR, answer
    assert_says(case, answer.output, tmp_path)


@pytest.mark.parametrize("case", LATE, ids=lambda case: case.id)
def test_refused_by_the_run(case: Case, late_runs: LateRuns) -> None:
    """What only workers or code of the user can find."""
    assert_says(case, late_runs.message(case), late_runs.folder(case))


def run_alone(case: Case, workspace: Workspace, folder: Path) -> Answer:
    """Run the command of a case in a process of its own."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words(case, Place(folder, workspace))]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | workspace.preloaded_workers
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return Answer(done.returncode, done.stdout + done.stderr, folder)


@pytest.mark.parametrize(
    "name",
    [
        "config: several mistakes at once",
        "data: a prompt without a message",
        "checkpoint: a truncated model file",
        "model: truncated weights",
    ],
)
def test_a_process_of_its_own_says_the_same(
    name: str, launcher: Launcher, workspace: Workspace, tmp_path: Path
) -> None:
    case = by_id(name)
    alone = run_alone(case, workspace, tmp_path / "case")
    assert alone.code == USAGE_ERROR
    forked = launcher.run(words(case, Place(tmp_path / "case", workspace)), tmp_path / "case")
    assert alone.message == forked.message
    assert len(alone.output.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", ["reward: a module that cannot be imported", "model: weights of other sizes"])
def test_a_failed_run_ends_with_code_1_and_no_stack_trace(name: str, workspace: Workspace, tmp_path: Path) -> None:
    case = by_id(name)
    answer = run_alone(case, workspace, tmp_path)
    assert answer.code == FAILED_RUN
    assert_says(case, answer.message, tmp_path)
    assert_says(case, answer.output, tmp_path)
    assert "Traceback" in (tmp_path / "run" / "error.log").read_text()


def test_the_table_is_large_enough() -> None:
    counts = Counter(case.group for case in CASES)
    assert list(counts) == list(GROUPS) and min(counts.values()) >= 9 and len(CASES) >= 45
    assert len({case.id for case in CASES}) == len(CASES)


def test_the_page_lists_every_case() -> None:
    page = PAGE.read_text()
    missing = [case.id for case in CASES if row_of(case) not in page]
    assert not missing, f"write {PAGE} anew by python -m tests.special_e2e.errors_page: {missing}"
