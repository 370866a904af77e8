"""Trackers that the user has not chosen: wandb is left out where it cannot log."""

import importlib.util
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from verl.trainer import preflight
from verl.trainer.config.run_config import TrainerConfig
from verl.utils.import_utils import has_module
from verl.utils.observe import tracking
from verl.utils.observe.tracking import check_backends, wandb_obstacle

ROOT = Path(__file__).resolve().parents[2]
CONFIG_DIR = ROOT / "verl/trainer/config"
NO_LOGIN = "it has no login for api.wandb.ai"
APP = textwrap.dedent("""
    from verl.trainer.config.cli import hydra_main
    from verl.trainer.preflight import leave_out_wandb

    @hydra_main({!r}, config_path={!r})
    def main(config):
        leave_out_wandb(config)
        print("used:", *config.trainer.logger)

    main()
""")


def used(folder: Path, words: list[str], name: str = "ppo_trainer", config_dir: Path = CONFIG_DIR) -> str:
    """Return what a command says and uses; it finds a package wandb that must not be imported, and no login."""
    package = folder / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('nobody imports it')\n")
    (folder / "app.py").write_text(APP.format(name, str(config_dir)))
    done = subprocess.run(
        [sys.executable, "app.py", *words, "hydra.run.dir=."],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_user_has_not_written_is_left_out_with_one_notice(tmp_path: Path) -> None:
    said = used(tmp_path, ["trainer.test_freq=5"], "dapo_trainer", ROOT / "recipe/dapo/config")
    assert "used: console\n" in said
    assert said.count(f"trainer.logger=[console]: wandb is left out, since {NO_LOGIN}. Set the key to choose") == 1


def test_what_the_command_line_says_stays(tmp_path: Path) -> None:
    assert used(tmp_path, ["trainer.logger=[console,wandb]"]).splitlines() == ["used: console wandb"]


def test_what_a_file_of_the_user_says_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/trackers.yaml").write_text("logger: [console, wandb]\n")
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, run/trackers@trainer, _self_]\n")
    assert used(tmp_path, ["--config-name", "mine", "--config-dir", "."]).splitlines() == ["used: console wandb"]


def test_what_code_of_the_user_composes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "wandb_obstacle", lambda variables: NO_LOGIN)
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose("ppo_trainer")
    preflight.leave_out_wandb(config)
    assert config.trainer.logger == ["console", "wandb"]


LOGINS: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "none": ({}, {}, NO_LOGIN),
    "a key": ({"WANDB_API_KEY": "k"}, {}, None),
    "a token": ({"WANDB_IDENTITY_TOKEN_FILE": "t"}, {}, None),
    "offline": ({"WANDB_MODE": "offline"}, {}, None),
    "disabled": ({"WANDB_MODE": "disabled"}, {}, None),
    "online": ({"WANDB_MODE": "online"}, {}, NO_LOGIN),
    "wandb offline in this folder": ({}, {"run/wandb/settings": "[default]\nmode = offline\n"}, None),
    "settings that cannot be read": ({}, {"run/wandb/settings": "mode\n"}, NO_LOGIN),
    "netrc": ({}, {".netrc": "machine api.wandb.ai login user password k\n"}, None),
    "netrc elsewhere": ({"NETRC": "{at}/mine"}, {"mine": "machine api.wandb.ai login user password k\n"}, None),
    "netrc of another host": ({}, {".netrc": "machine example.com login user password k\n"}, NO_LOGIN),
    "netrc that cannot be read": ({}, {".netrc": "machine\n"}, NO_LOGIN),
    "a server of one's own": (
        {"WANDB_BASE_URL": "https://wandb.example.com:8080"},
        {".netrc": "machine wandb.example.com login user password k\n"},
        None,
    ),
    "a server that wandb login has saved": (
        {},
        {".config/wandb/settings": "[default]\nbase_url = http://localhost:8080\n"},
        "it has no login for localhost",
    ),
}


@pytest.mark.parametrize("case", LOGINS)
def test_where_a_login_is_found(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, files, obstacle = LOGINS[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
    (tmp_path / "run").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tracking, "is_installed", lambda name: True)
    assert wandb_obstacle({name: value.format(at=tmp_path) for name, value in variables.items()}) == obstacle


def test_output_of_wandb_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m`` finds the folder ``wandb`` that an earlier run has written."""

    def find(name: str) -> ModuleSpec:
        return ModuleSpec(name, None, is_package=True)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    has_module.cache_clear()
    assert wandb_obstacle({"WANDB_API_KEY": "k"}) == "the package wandb is not installed"
    has_module.cache_clear()


def test_the_default_of_supervised_training_needs_no_package() -> None:
    for name in ("sft_trainer", "sft_trainer_engine"):
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            assert check_backends(compose(name).trainer.logger) == ["console"]
    assert TrainerConfig().logger == ["console", "wandb"]
