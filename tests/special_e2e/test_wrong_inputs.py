"""Wrong inputs, and the message that each gets.

The table is ``wrong_input_cases.py``, their messages are ``wrong_input_answers.json``, and ``docs/errors.md`` shows
some of them; ``python -m tests.special_e2e.errors_page`` writes both anew.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Workspace
from .errors_page import PAGE, SHOWN, TITLES, known_answers, page
from .wrong_input_cases import CASES
from .wrong_inputs import USAGE_ERROR, Answer, Case, LateRuns, Launcher, Place, run_alone, verdict, words

EARLY, LATE = [case for case in CASES if not case.late], [case for case in CASES if case.late]
SELECTION = 64
"""Continuous integration tries one in so many of those that are refused before the start, and those that only a run can
find unless they start workers of their own."""


def by_id(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


@pytest.fixture(scope="module", autouse=True)
def late_runs(request: pytest.FixtureRequest) -> Iterator[LateRuns | None]:
    """The launch of the late cases that are asked for, next to the tests of the others; None if there are none."""
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_refused_by_the_run"
    ]
    if not asked:
        yield None
        return
    folder = request.getfixturevalue("tmp_path_factory").mktemp("late")
    with LateRuns(asked, request.getfixturevalue("workspace"), folder) as runs:
        yield runs


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] if i % SELECTION else []) for i, case in enumerate(EARLY)],
    ids=[case.id for case in EARLY],
)
def test_refused_before_ray(case: Case, launcher: Launcher, workspace: Workspace, tmp_path: Path) -> None:
    """The launching process refuses it before it would have started Ray, and without having imported torch."""
    kind, why = verdict(case, launcher.run(case, Place(tmp_path, workspace)))
    assert kind == "clear", why


def starts_workers(case: Case) -> bool:
    """Whether a late case starts workers that no other case uses."""
    return case.group == "model" and case.late == "alone"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] if starts_workers(case) else []) for case in LATE],
    ids=[case.id for case in LATE],
)
def test_refused_by_the_run(case: Case, late_runs: LateRuns) -> None:
    """What only workers or code of the user can find."""
    kind, why = verdict(case, late_runs.answer(case))
    assert kind == "clear", why


@pytest.mark.parametrize(
    "name",
    [
        "data: a prompt without a message",
        pytest.param("checkpoint: a truncated model file", marks=pytest.mark.full),
    ],
)
def test_a_process_of_its_own_says_the_same(
    name: str, launcher: Launcher, workspace: Workspace, tmp_path: Path
) -> None:
    case = by_id(name)
    place = Place(tmp_path / "case", workspace)
    alone = run_alone(case.command, words(case, place), place.folder, {})
    assert alone.code == USAGE_ERROR and alone.message == launcher.run(case, place).message


@pytest.mark.parametrize(
    "name",
    [
        "reward: a module that cannot be imported",
        # engine/test_stored_model.py refuses them
        pytest.param("model: weights of other sizes", marks=pytest.mark.full),
    ],
)
def test_a_run_that_finds_it_ends_with_code_2_and_no_stack_trace(
    name: str, workspace: Workspace, tmp_path: Path
) -> None:
    case = by_id(name)
    line = words(case, Place(tmp_path, workspace))
    answer = run_alone(case.command, line, tmp_path, workspace.preloaded_workers)
    message = Answer(answer.code, answer.message, tmp_path)
    assert verdict(case, message) == ("clear", ""), answer.output
    assert "Traceback" in (tmp_path / "run" / "error.log").read_text()


def test_the_program_tells_what_is_not_clear(tmp_path: Path) -> None:
    case = Case("config", "a seed", {}, ("trainer.seed=x",))
    clear = "error in the configuration: trainer.seed=x: must be an integer"
    told = {
        "clear": (2, clear),
        "accepted": (0, clear),
        "hung": (71, ""),
        "exit code 1": (1, clear),
        "6 lines": (2, clear + "\nmore" * 5),
        "a stack trace": (2, clear + "\nTraceback (most recent call last)"),
        "does not say 'trainer.seed=x'": (2, "must be an integer"),
        "does not say what to write instead": (2, "trainer.seed=x: ValueError"),
    }
    for expected, (code, output) in told.items():
        assert expected in ": ".join(verdict(case, Answer(code, output, tmp_path))), expected


def test_the_table_is_large_enough() -> None:
    counts = Counter(case.group for case in CASES)
    assert list(counts) == list(TITLES) and len(CASES) >= 480
    assert len({case.id for case in CASES}) == len(CASES)


def test_every_case_was_answered_clearly() -> None:
    answers = known_answers()
    assert answers.keys() == {case.id for case in CASES}, "try all: python -m tests.special_e2e.errors_page"
    assert {answer["verdict"] for answer in answers.values()} == {"clear"}


def test_the_page_shows_what_people_meet() -> None:
    answers = known_answers()
    assert len(set(SHOWN)) == 40 and answers.keys() >= set(SHOWN)
    shown = page({name: answer["message"] for name, answer in answers.items()})
    assert PAGE.read_text(encoding="utf-8") == shown, "write it again: python -m tests.special_e2e.errors_page --page"
