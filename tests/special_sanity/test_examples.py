"""The scripts of examples and recipes: their keys exist, their values fit together; keys that pages name exist too."""

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.dapo.main_dapo import DAPOTaskRunner
from recipe.entropy.main_entropy import EntropyTaskRunner
from recipe.one_step_off_policy.main_ppo import OneStepOffTaskRunner
from tests.composition import composed_config
from tests.special_sanity.test_docs import PAGES
from verl.base_config import ConfigError
from verl.trainer.config.async_training import SYNC
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.generation_server import parse_generation_server
from verl.trainer.config.keys import OPTIONAL, dotted_keys, is_free
from verl.trainer.config.other_versions import ROWS
from verl.trainer.config.rules import profiler
from verl.trainer.config.rules.asynchronous import complete
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.sft import parse_sft_config
from verl.trainer.config.validation import examined_config
from verl.trainer.ppo.utils import need_critic

ROOT = Path(__file__).parents[2]
CONFIG_OF_MODULE = {
    "examples.split_placement.main_ppo_split": "ppo_trainer_split",
    "recipe.dapo.main_dapo": "dapo_trainer",
    "recipe.entropy.main_entropy": "entropy_trainer",
    "recipe.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "recipe.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "recipe.prime.main_prime": "prime_trainer",
    "recipe.spin.main_spin": "spin_trainer",
    "recipe.sppo.main_sppo": "sppo_trainer",
    "recipe.r1.main_eval": "evaluation",
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.main_generation_server": "generation_server",
    "verl.trainer.main_eval": "evaluation",
}
RECIPE_NODES = {
    "examples.split_placement.main_ppo_split": (),
    "recipe.dapo.main_dapo": DAPOTaskRunner.recipe_nodes,
    "recipe.entropy.main_entropy": EntropyTaskRunner.recipe_nodes,
    "recipe.fully_async_policy.fully_async_main": (),
    "recipe.one_step_off_policy.main_ppo": OneStepOffTaskRunner.recipe_nodes,
    "recipe.prime.main_prime": (),
    "recipe.spin.main_spin": (),
    "recipe.sppo.main_sppo": (),
    "verl.trainer.main_ppo": (),
}
RECIPE_RULES = {"recipe.one_step_off_policy.main_ppo": OneStepOffTaskRunner.recipe_rules}
OVERRIDE_OF_OTHERS = {
    "verl.trainer.main_generation_server": ("actor_rollout_ref.rollout.n", "7"),  # before the shorter name
    "verl.trainer.main_generation": ("data.n_samples", "7"),
    "verl.trainer.main_eval": ("scoring.timeout_s", "7"),
    "recipe.r1.main_eval": ("scoring.timeout_s", "7"),
}
"""Module whose command has no training steps -> another key of it."""


class Waiting(NamedTuple):
    """The key for which a script is refused before the start, and a setting with which it is not."""

    refused: str
    key: str
    instead: str


NPU_MEGATRON = Waiting("actor_rollout_ref.actor.strategy", "trainer.device", "cuda")
WAITING = {
    "recipe/dapo/run_dapo_qwen3_moe_30b_megatron_npu.sh": NPU_MEGATRON,
}
"""Script that keeps its established setting -> what it waits for; the README of its folder says so."""
SCRIPTS = sorted(path for root in ("examples", "recipe") for path in (ROOT / root).glob("*/**/*.sh"))
LAUNCHERS = [path for path in SCRIPTS if not path.name.startswith("prepare_")]
MODEL_KEYS = (
    *(f"{node}.model.path" for node in ("actor_rollout_ref", "critic", "reward_model")),
    *("model.path", "model.partial_pretrain"),
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FAKE = """#!/usr/bin/env bash
exec 9>> "$RECORD"
flock 9  # a script may start a server in the background
printf '%s\\0' "$@" >&9; printf '\\n' >&9
"""
FAKES = dict.fromkeys(("python", "python3", "torchrun", "ray"), FAKE) | {
    "srun": '#!/usr/bin/env bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/usr/bin/env bash\nprintf 'node1\\nnode2\\n'\n",
}
SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}


def compose_command(words: list[str]) -> DictConfig:
    """Compose the configuration that ``python -m module [--config-path=... --config-name=...] key=value ...`` sees."""
    position = next(i for i, word in enumerate(words) if word in CONFIG_OF_MODULE)
    flags = dict(word.split("=", 1) for word in words if re.match(r"--config-(path|name)=", word))
    overrides = [word for word in words[position + 1 :] if not re.match(r"--config-(path|name)=|--check$", word)]
    return composed(words[position], overrides, flags.get("--config-name"), flags.get("--config-path"))


def composed(module: str, overrides: list[str], name: str | None = None, path: str | None = None) -> DictConfig:
    """Compose the configuration of a module with the overrides of its command line.

    A path is relative to the folder of the module, or to the working folder.
    """
    folder = ROOT.joinpath(*module.split(".")[:-1], path or "config")
    if not folder.is_dir():
        folder = ROOT / (path or "config")
    return composed_config(folder, name or CONFIG_OF_MODULE[module], overrides)


def override_for(script: Path) -> tuple[str, str]:
    """Return a key that the command of a script has, and a value that it does not write itself."""
    text = text_of(script).replace('$(basename "$HERE")', script.parent.name)
    trains = any(module in text for module in CONFIG_OF_MODULE if module not in OVERRIDE_OF_OTHERS)
    others = [override for module, override in OVERRIDE_OF_OTHERS.items() if module in text]
    return others[0] if others and not trains else ("trainer.total_training_steps", "7")


def text_of(script: Path) -> str:
    """Return the text of a script, after the text of the script that it runs, if any."""
    text = script.read_text()
    other = re.search(r"^[^#\n]*\bbash [^/\n]*/([\w./-]+\.sh)\b", text, flags=re.MULTILINE)
    if other is None:
        return text
    base = script.parent / other[1]
    return text_of(base if base.exists() else script.with_name(base.name)) + text


def commands_of_script(script: Path, folder: Path, arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Run a script with a Python that records its arguments and does nothing; by default it overrides one key."""
    record = folder / "record"
    for name, fake in FAKES.items():
        (folder / name).write_text(fake)
        (folder / name).chmod(0o755)
    environment = os.environ | SLURM | {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(
        ["bash", script, *(["=".join(override_for(script))] if arguments is None else arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_script_is_a_run_that_would_start_and_passes_overrides_on(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_PACKAGES", {})  # the machine that runs a script has the profiler that it names
    monkeypatch.setattr(profiler.shutil, "which", str)
    find_spec = importlib.util.find_spec  # and the packages that take its traces
    traces = {name: ModuleSpec(name, None) for name in ("mlflow", "weave")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: traces.get(name) or find_spec(name, *rest))
    commands = commands_of_script(script, tmp_path)
    launches = [words for words in commands if set(words) & set(CONFIG_OF_MODULE)]
    assert launches, json.dumps(commands)
    key, value = override_for(script)
    overridden = []
    for words in launches:
        config = compose_command(words)
        overridden.append(str(OmegaConf.select(config, key)) == value)
        (module,) = set(words) & set(CONFIG_OF_MODULE)
        use_files_of_the_test(config, tmp_path)
        if module in RECIPE_NODES:
            assert_starts(script, config, module)
        elif module.endswith("sft_trainer"):
            parse_sft_config(config, *map(int, re.findall(r"--nproc_per_node=(\d+)", " ".join(words))))
        elif module == "verl.trainer.main_generation":
            GenerationConfig.parse(config)
        elif module == "verl.trainer.main_generation_server":
            parse_generation_server(config)
    assert sum(overridden) == 1, f"{script.name} must pass its arguments to one command"


@pytest.mark.parametrize(
    "script",
    [script for script in LAUNCHERS if "${WORKERS:-" in script.read_text() and "${CPU[@]}" in script.read_text()],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_script_for_cpus_runs_on_the_workers_that_it_is_given(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "3")
    words = [word for command in commands_of_script(script, tmp_path) for word in command]
    assert [word for word in words if word.startswith("trainer.n_gpus_per_node=")][-1] == "trainer.n_gpus_per_node=3"


def assert_starts(script: Path, config: DictConfig, module: str) -> None:
    """Assert that a run passes the checks before the start, or is refused for what ``WAITING`` says alone."""
    if config.async_training.mode != SYNC:
        complete(config)
    reason = WAITING.get(str(script.relative_to(ROOT)))
    if reason is not None:
        with pytest.raises(ConfigError) as refused:
            check(config, module)
        (told,) = refused.value.violations
        assert told.key == reason.refused
        OmegaConf.update(config, reason.key, reason.instead)
    check(config, module)


def check(config: DictConfig, module: str) -> None:
    """Check a configuration as a start of the module does."""
    nodes, rules = RECIPE_NODES[module], RECIPE_RULES.get(module)
    examined_config(
        config, RunConfig.parse(config).needs_reference, need_critic(config), nodes, recipe_rules=rules
    ).checked()


def use_files_of_the_test(config: DictConfig, folder: Path) -> None:
    """Stand in for the files that the script reads; what is named on the hub is left as it is."""
    rows = folder / "rows.parquet"
    rows.write_text("rows")
    for key in ("data.train_files", "data.val_files", "data.path"):
        if OmegaConf.select(config, key):
            OmegaConf.update(config, key, str(rows))
    for key in MODEL_KEYS:
        path = OmegaConf.select(config, key)
        if key == "reward_model.model.path" and path and not config.reward_model.enable:
            continue
        if path and not HUB_ID.fullmatch(path):
            OmegaConf.update(config, key, "Qwen/Qwen2.5-0.5B")


def test_keys_named_in_the_docs_exist() -> None:
    """A dotted key in backticks is one of some command; a bare folder or module is not checked."""
    names = [*CONFIG_OF_MODULE.items(), ("verl.trainer.main_ppo", "ppo_megatron_trainer")]
    trees = [OmegaConf.to_container(composed(module, [], name), resolve=False) for module, name in names]
    known = set(OPTIONAL).union((row.key for row in ROWS if not row.roots), *(dotted_keys(tree) for tree in trees))
    roots = set(trees[0]) - {"hydra"}  # pages abbreviate what is below actor_rollout_ref
    unknown = []
    for page in PAGES:
        if page.name in ("errors.md", "other_versions.md"):  # wrong inputs, and keys that are not ours
            continue
        for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
            if word.split(".")[0] in roots and word not in known and not is_free(word, known):
                unknown.append(f"{page.name}: {word}")
    assert not unknown, unknown


def test_every_folder_says_what_its_scripts_do() -> None:
    for script in SCRIPTS:
        readmes = [folder / "README.md" for folder in script.parents[:2] if (folder / "README.md").exists()]
        text = "".join(readme.read_text() for readme in readmes)
        assert f"`{script.name}`" in text, f"{readmes} have no line for {script.name}"
