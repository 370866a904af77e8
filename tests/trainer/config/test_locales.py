"""Commands under locales without UTF-8: they take paths that are not ASCII, or name the key of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCALES = {
    "POSIX": {"LC_ALL": "POSIX"},
    "ASCII terminal": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "no UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0"},
}
PATH = {
    "POSIX": "dätä.parquet",
    "ASCII terminal": r"d\xe4t\xe4.parquet",
    "no UTF-8": r"d\xe4t\xe4.parquet",
}
"""A name as the terminal shows it."""


def refused(locale: str, module: str, *words: str, cwd: Path) -> str:
    """Return what a command writes that is refused."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), **LOCALES[locale]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("locale", LOCALES)
def test_the_key_of_a_path_is_named(tmp_path: Path, locale: str) -> None:
    words = f"data.train_files='{tmp_path}/dätä.parquet'"
    output = refused(locale, "verl.trainer.sft_trainer", words, cwd=tmp_path)
    assert f"data.train_files={tmp_path}/{PATH[locale]}" in output.replace("'", "").replace('"', "")
    assert ("set PYTHONUTF8=1" if locale == "no UTF-8" else "no such file") in output


def test_every_key_and_the_working_folder_are_named(tmp_path: Path) -> None:
    names = {
        "data.train_files": "['dätä.parquet']",
        "actor_rollout_ref.model.path": "'模型'",
        "trainer.default_local_dir": "'läufe'",
    }
    here = tmp_path / "hïer"
    here.mkdir()
    words = [f"{key}={name}" for key, name in names.items()]
    output = refused("no UTF-8", "verl.trainer.main_ppo", *words, cwd=here)
    assert [key for key in (*names, "the working folder") if f"- {key}=" not in output] == []


@pytest.mark.parametrize(
    "locale, told",
    [("no UTF-8", r"l\xe4ufe' is not ASCII"), pytest.param("POSIX", "läufe holds no", marks=pytest.mark.full)],
)
def test_the_arguments_of_small_commands_are_named(tmp_path: Path, locale: str, told: str) -> None:
    words = ["merge", "--backend", "fsdp", "--local_dir", f"{tmp_path}/läufe"]
    assert told in refused(locale, "verl.model_merger", *words, cwd=tmp_path)
