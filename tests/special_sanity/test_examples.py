"""The scripts of examples and recipes, and the commands in the docs: their keys exist, their values fit together."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipe.dapo.main_dapo import DAPOTaskRunner
from verl.trainer.config.keys import OPTIONAL, RENAMED, dotted_keys, is_free
from verl.trainer.config.rules import profiler
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.utils import need_critic
from verl.utils.config import validate_config

ROOT = Path(__file__).parents[2]
CONFIG_OF_MODULE = {
    "recipe.dapo.main_dapo": "dapo_trainer",
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.main_eval": "evaluation",
}
RECIPE_NODES = {"recipe.dapo.main_dapo": DAPOTaskRunner.recipe_nodes, "verl.trainer.main_ppo": ()}
SCRIPTS = sorted(path for root in ("examples", "recipe") for path in (ROOT / root).glob("*/**/*.sh"))
LAUNCHERS = [path for path in SCRIPTS if not path.name.startswith("prepare_")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipe").rglob("README.md"))]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FAKE = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
"""


def compose_command(words: list[str]) -> DictConfig:
    """Compose the configuration that ``python -m module [--config-name=name] key=value ...`` would see."""
    position = next(i for i, word in enumerate(words) if word in CONFIG_OF_MODULE)
    names = [word.partition("=")[2] for word in words if word.startswith("--config-name=")]
    overrides = [word for word in words[position + 1 :] if not word.startswith("--config-name=")]
    return composed(words[position], overrides, *names)


def composed(module: str, overrides: list[str], name: str | None = None) -> DictConfig:
    """Compose the configuration of a module with the overrides of its command line."""
    folder = ROOT.joinpath(*module.split(".")[:-1], "config")
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name or CONFIG_OF_MODULE[module], overrides=overrides)


def commands_of_script(script: Path, folder: Path) -> list[list[str]]:
    """Run a script with a Python that records its arguments and does nothing."""
    record = folder / "record"
    for name in ("python", "python3", "torchrun", "ray"):
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


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_script_is_a_run_that_would_start_and_passes_overrides_on(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_PACKAGES", {})  # the machine that runs a script has the profiler that it names
    monkeypatch.setattr(profiler.shutil, "which", str)
    commands = commands_of_script(script, tmp_path)
    launches = [words for words in commands if set(words) & set(CONFIG_OF_MODULE)]
    assert len(launches) == 1, json.dumps(commands)
    config = compose_command(launches[0])
    assert config.trainer.total_training_steps == 7
    (module,) = set(launches[0]) & set(CONFIG_OF_MODULE)
    if module in RECIPE_NODES:
        use_files_of_the_test(config, tmp_path)
        validate_config(config, RunConfig.parse(config).needs_reference, need_critic(config), RECIPE_NODES[module])


def use_files_of_the_test(config: DictConfig, folder: Path) -> None:
    """Stand in for the files that the script reads; what is named on the hub is left as it is."""
    rows = folder / "rows.parquet"
    rows.write_text("rows")
    config.data.train_files = config.data.val_files = str(rows)
    for model in (config.actor_rollout_ref.model, config.critic.model):
        if not HUB_ID.fullmatch(model.path):
            model.path = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_the_docs_set_keys_that_exist(page: Path) -> None:
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            if set(words) & set(CONFIG_OF_MODULE):
                compose_command(words)


def test_keys_named_in_the_docs_exist() -> None:
    """A dotted key in backticks is one of some command; a bare folder or module is not checked."""
    names = [*CONFIG_OF_MODULE.items(), ("verl.trainer.main_ppo", "ppo_megatron_trainer")]
    trees = [OmegaConf.to_container(composed(module, [], name), resolve=False) for module, name in names]
    known = set(OPTIONAL).union(RENAMED, *(dotted_keys(tree) for tree in trees))
    roots = set(trees[0]) - {"hydra"}  # pages abbreviate what is below actor_rollout_ref
    unknown = []
    for page in PAGES:
        if page.name == "errors.md":  # the page of wrong inputs
            continue
        for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
            if word.split(".")[0] in roots and word not in known and not is_free(word, known):
                unknown.append(f"{page.name}: {word}")
    assert not unknown, unknown


def test_every_folder_says_what_its_scripts_do() -> None:
    for script in SCRIPTS:
        readme = script.parent / "README.md"
        assert f"`{script.name}`" in readme.read_text(), f"{readme} has no line for {script.name}"
