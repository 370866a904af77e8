"""The requirements files say what ``pyproject.toml`` says, and can be read by pip."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.write_requirements import EXTRAS_OF_FILE, contents, outdated

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_files_are_up_to_date() -> None:
    assert outdated(ROOT) == [], "run python scripts/write_requirements.py"


def test_a_change_of_the_project_is_seen(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"tqdm>=4.66"', '"tqdm>=4.67"'))
    for name in EXTRAS_OF_FILE:
        (tmp_path / name).write_text((ROOT / name).read_text())
    with_dependencies = set(EXTRAS_OF_FILE) - {"requirements-test.txt", "requirements-docs.txt"}
    assert set(outdated(tmp_path)) == with_dependencies


def test_a_missing_file_is_out_of_date(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert outdated(tmp_path) == list(EXTRAS_OF_FILE)


@pytest.mark.parametrize("name", EXTRAS_OF_FILE)
def test_every_line_is_a_requirement(name: str) -> None:
    lines = [line for line in contents(name, PROJECT).splitlines() if not line.startswith("#")]
    names = [Requirement(line).name for line in lines]
    assert names and len(set(names)) == len(names)


def test_every_extra_is_in_some_file() -> None:
    assert {extra for extras in EXTRAS_OF_FILE.values() for extra in extras} == set(PROJECT["optional-dependencies"])
