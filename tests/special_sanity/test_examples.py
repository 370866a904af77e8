"""The example scripts and the commands in the docs set keys that exist."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.keys import FREE_FORM, OPTIONAL, dotted_keys, is_under

ROOT = Path(__file__).parents[2]
CONFIG_OF_MODULE = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.main_eval": "evaluation",
}
SCRIPTS = sorted((ROOT / "examples").glob("*/*.sh"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FAKE = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
"""


def compose_command(words: list[str]) -> DictConfig:
    """Compose the configuration that ``python -m module key=value ...`` would see."""
    position = next(i for i, word in enumerate(words) if word in CONFIG_OF_MODULE)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(CONFIG_OF_MODULE[words[position]], overrides=words[position + 1 :])


def commands_of_script(script: Path, folder: Path) -> list[list[str]]:
    """Run a script with a Python that records its arguments and does nothing."""
    record = folder / "record"
    for name in ("python", "python3", "torchrun"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(
        ["bash", script, "trainer.total_training_steps=7"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_script_sets_keys_that_exist_and_passes_overrides_on(script: Path, tmp_path: Path) -> None:
    commands = commands_of_script(script, tmp_path)
    launches = [words for words in commands if set(words) & set(CONFIG_OF_MODULE)]
    assert len(launches) == 1, json.dumps(commands)
    assert compose_command(launches[0]).trainer.total_training_steps == 7


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_the_docs_set_keys_that_exist(page: Path) -> None:
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            if set(words) & set(CONFIG_OF_MODULE):
                compose_command(words)


def test_keys_named_in_the_docs_exist() -> None:
    """A dotted key in backticks is one of some command; a bare folder or module is not checked."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        trees = [OmegaConf.to_container(compose(name), resolve=False) for name in CONFIG_OF_MODULE.values()]
    known = set(OPTIONAL).union(*(dotted_keys(tree) for tree in trees))
    roots = set(trees[0])  # pages abbreviate what is below actor_rollout_ref
    unknown = []
    for page in PAGES:
        if page.name == "errors.md":  # the page of wrong inputs
            continue
        for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
            if word.split(".")[0] in roots and word not in known and not is_under(word, FREE_FORM):
                unknown.append(f"{page.name}: {word}")
    assert not unknown, unknown


def test_every_folder_of_examples_says_what_its_scripts_do() -> None:
    for script in SCRIPTS:
        readme = script.parent / "README.md"
        assert f"`{script.name}`" in readme.read_text(), f"{readme} has no line for {script.name}"
