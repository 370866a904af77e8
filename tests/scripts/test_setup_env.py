"""The set-up of the environment in odd but real situations, with a Python that only notes what it is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = r"""#!/bin/bash
# Stands for an interpreter: NOTES holds what it was asked for, BROKEN what it fails at.
echo "$*" >>"$NOTES"
here="$(cd "$(dirname "$0")" && pwd)"
case "$1 $2" in
    "-V "*) echo "Python 3.11.9" ;;
    "-m venv")
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
        [ "$BROKEN" != venv ] && touch "$3/bin/pip" || exit 1
        ;;
    "-m ensurepip") touch "$here/pip" ;;
    "-m pip") [ -e "$here/pip" ] && [ "$3 $BROKEN" != "install pip" ] || exit 1 ;;
    "-c "*) [ ! -e "$here/too_old" ] || exit 1 ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Return a function that runs the script in a copy of what it reads, and gives exit code, output and notes."""
    clone = tmp_path / "a clone (1)"
    clone.mkdir()
    for name in (
        "scripts/setup_env.sh",
        "scripts/torch_extras.py",
        "requirements-cpu.lock",
        "pyproject.toml",
    ):
        (clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    python = tmp_path / "some where" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    notes = tmp_path / "notes"

    def run(venv=".venv", broken="", **variables):
        notes.write_text("")
        env = {"PATH": os.environ["PATH"], "NOTES": str(notes), "BROKEN": broken, "HOME": "/nowhere"}
        env |= {"VERL_PYTHON": str(python), "VERL_VENV": str(venv), "VERL_SKIP_CHECKS": "1", **variables}
        done = subprocess.run(["bash", "scripts/setup_env.sh"], cwd=clone, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, notes.read_text()

    run.clone, run.python = clone, python
    return run


def test_it_installs_once_and_again_when_something_changed(setup):
    code, output, notes = setup()
    assert code == 0 and ".venv is ready" in output and "-m venv .venv" in notes and "install" in notes
    code, output, notes = setup()
    assert code == 0 and ".venv is up to date" in output and "install" not in notes
    (setup.clone / "pyproject.toml").write_text("changed")
    code, output, notes = setup()
    assert code == 0 and "-m venv" not in notes and "install" in notes


@pytest.mark.parametrize("broken", ["venv", "pip"])
def test_an_interrupted_installation_goes_on(setup, broken):
    code, output, _ = setup(broken=broken)
    assert code != 0 and ".venv is ready" not in output
    code, output, notes = setup()
    assert code == 0 and ".venv is ready" in output
    assert ("-m venv" in notes) == (broken == "venv")  # half an environment is made anew, half a set of packages is not


def test_nothing_is_removed_that_the_script_has_not_made(setup, tmp_path):
    home = tmp_path / "home"
    (home / "papers").mkdir(parents=True)
    code, output, _ = setup(home)
    assert code != 0 and f"{home} exists, was not created by this script" in output and "VERL_VENV=" in output
    assert (home / "papers").is_dir()


def test_an_environment_of_another_version_is_replaced_only_where_it_is_ours(setup):
    assert setup()[0] == 0
    venv = setup.clone / ".venv"
    (venv / "bin" / "too_old").touch()
    (venv / "lib").mkdir()
    (venv / ".verl-setup").unlink()
    code, output, notes = setup()
    assert code == 0 and "-m venv .venv" in notes and not (venv / "lib").exists()
    (venv / "bin" / "too_old").touch()
    (venv / ".verl-setup").unlink()
    (venv / ".verl-made-here").unlink()
    code, output, _ = setup()
    assert code != 0 and "it has Python 3.11.9" in output and (venv / "bin" / "python").exists()


def test_an_environment_of_the_user_is_taken_as_it_is(setup, tmp_path):
    venv = tmp_path / "mine"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(setup.python, venv / "bin" / "python")  # without pip, as uv makes them
    code, output, notes = setup(venv)
    assert code == 0 and "-m ensurepip" in notes and "-m venv" not in notes and f"{venv} is ready" in output


def test_no_python_is_said_with_what_was_tried(setup):
    code, output, _ = setup(VERL_PYTHON="/no where/python")
    assert code != 0 and "no usable Python: verl needs 3.11 or 3.12" in output and "/no where/python=" in output
