"""All problems of all stages at once: by ``--check``, and by a start unless it stops at keys and types."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.trainer.config.invocation import NOT_LOOKED_AT

from .conftest import REPOSITORY, Workspace
from .launcher import REACHED_RAY
from .wrong_input_stages import COMBINED, STAGES, combined, corrected
from .wrong_inputs import USAGE_ERROR, Case, Launcher, Place, run_alone, verdict, words

CHECK = {"--check": ""}
EARLY = "keys and types"
IN_CI = (5,)
"""What continuous integration tries: a command without code of the user, which takes seconds to import."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def place(workspace: Workspace, tmp_path: Path) -> Place:
    return Place(tmp_path / "case", workspace)


NUMBERS = [pytest.param(n, marks=[] if n in IN_CI else [pytest.mark.full]) for n in range(len(COMBINED))]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_check_finds_the_problems_of_all_stages_in_one_call(number: int, launcher: Launcher, place: Place) -> None:
    answer = launcher.run(combined(COMBINED[number], CHECK), place)
    assert verdict(combined(COMBINED[number]), answer) == ("clear", ""), answer.output
    assert NOT_LOOKED_AT not in answer.output and "more, in" not in answer.output
    made = {path.name for path in place.folder.rglob("*")} & {".owner", ".hydra", "error.log", "outputs"}
    assert not made, "a check writes nothing"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_start_stops_at_keys_and_types(number: int, launcher: Launcher, place: Place) -> None:
    answer = launcher.run(combined(COMBINED[number]), place)
    early = COMBINED[number][EARLY]
    assert answer.code == USAGE_ERROR and answer.output.strip().endswith(NOT_LOOKED_AT), answer.output
    assert all(part in answer.output for part in early.says if not part.endswith("problems:")), answer.output


@pytest.mark.parametrize("number", NUMBERS)
def test_a_start_finds_the_problems_of_all_later_stages_at_once(number: int, launcher: Launcher, place: Place) -> None:
    late = {stage: case for stage, case in COMBINED[number].items() if stage != EARLY}
    answer = launcher.run(combined(late), place)
    assert verdict(combined(late), answer) == ("clear", ""), answer.output
    assert NOT_LOOKED_AT not in answer.output


@pytest.mark.parametrize("number", NUMBERS)
def test_what_the_check_names_is_all_that_a_start_finds(
    number: int, launcher: Launcher, workspace: Workspace, tmp_path: Path
) -> None:
    """With everything corrected as the messages say, the check passes, and the start goes on to Ray."""
    answer = launcher.run(corrected(COMBINED[number], CHECK), Place(tmp_path / "check", workspace))
    assert answer.code == 0 and "passed all checks" in answer.output.splitlines(), answer.output
    answer = launcher.run(corrected(COMBINED[number]), Place(tmp_path / "start", workspace))
    assert answer.code == REACHED_RAY, answer.output


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(COMBINED)))
def test_a_corrected_command_trains(number: int, workspace: Workspace, tmp_path: Path) -> None:
    """Workers and agent loops find nothing either, up to the end of the first step."""
    place = Place(tmp_path / "run", workspace)
    place.folder.mkdir()
    make = corrected(COMBINED[number]).make
    assert callable(make)
    overrides = dict(make(place)) | {"trainer.total_training_steps": 1, "trainer.test_freq": -1}  # type: ignore[arg-type]
    name = f"corrected_{number}"
    folder = Path(overrides.pop("trainer.default_local_dir", workspace.folder / name))
    env = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(place.folder)])}
    run = workspace.train(name, overrides | {"trainer.default_local_dir": folder}, env=env)
    assert run.returncode == 0 and (folder / "metrics.jsonl").read_text()


def test_recipes_and_supervised_training_are_checked_too(launcher: Launcher, place: Place, tmp_path: Path) -> None:
    recipe = combined(COMBINED[1], CHECK, command="recipe.dapo.main_dapo")
    answer = launcher.run(recipe, place)
    assert verdict(recipe, answer) == ("clear", ""), answer.output
    wrong = {
        "trainer.epochs": 1,
        "optim.lr": -1,
        "trainer.logger": "[console,clearml]",
        "data.train_files": place.workspace.folder / "train.parquet",
        "data.max_length": "long",
    }
    says = ("trainer.epochs=1", "optim.lr=-1", "clearml", "column 'messages'", "max_length=long")
    supervised = Case("combined", "supervised", CHECK | wrong, says, command="verl.trainer.sft_trainer")
    answer = launcher.run(supervised, Place(tmp_path / "supervised", place.workspace))
    assert verdict(supervised, answer) == ("clear", ""), answer.output


@pytest.fixture(scope="module")
def heavy_launcher() -> Iterator[Launcher]:
    """Launch commands whose checks import torch."""
    with Launcher("verl.trainer.config.generation", "verl.workers.rewards.loading") as launcher:
        yield launcher


@pytest.mark.full  # trainer/test_main_generation.py and test_main_eval.py check in their process
@pytest.mark.parametrize("command", ["verl.trainer.main_generation", "verl.trainer.main_eval"])
def test_other_commands_are_checked_too(command: str, heavy_launcher: Launcher, place: Place) -> None:
    right = heavy_launcher.run(Case("combined", "right", CHECK, (), command=command), place)
    assert right.code == 0 and "passed all checks" in right.output.splitlines(), right.output
    wrong = heavy_launcher.run(Case("combined", "wrong", CHECK | {"data.pth": "x"}, (), command=command), place)
    assert wrong.code == USAGE_ERROR and "data.pth=x: there is no such key" in wrong.output, wrong.output


def test_a_right_command_passes_and_leaves_nothing(place: Place) -> None:
    case = Case("combined", "right", CHECK, ())
    line = words(case, place)
    before = {path: path.stat().st_mtime_ns for path in place.folder.parent.rglob("*")}
    answer = run_alone(case.command, line, place.folder, {"PYTHONDONTWRITEBYTECODE": "1"})
    assert answer.code == 0 and "passed all checks" in answer.output.splitlines(), answer.output
    assert {path: path.stat().st_mtime_ns for path in place.folder.parent.rglob("*")} == before


def test_sixty_commands_are_tried_and_each_is_in_a_stage() -> None:
    assert len({name for ids in STAGES.values() for name in ids}) == 60
    assert {len(ids) for ids in STAGES.values()} == {len(COMBINED)}
