"""``cp -r recipe/dapo recipe/mine``: the copy runs its own code and configuration, not those of the original."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Recipe(NamedTuple):
    """Main module of a recipe, module of its trainer, a file of its configuration, an override of a command."""

    main: str
    trainer: str | None
    config: str
    override: str = "trainer.total_training_steps=41"


RECIPES = {
    "dapo": Recipe("main_dapo", "dapo_ray_trainer", "dapo"),
    "entropy": Recipe("main_entropy", "entropy_ray_trainer", "entropy_trainer"),
    "one_step_off_policy": Recipe("main_ppo", "ray_trainer", "one_step_off"),
    "prime": Recipe("main_prime", "prime_ray_trainer", "prime_trainer"),
    "r1": Recipe("main_eval", None, "evaluation", "scoring.timeout_s=41"),
    "spin": Recipe("main_spin", "spin_trainer", "spin_trainer"),
    "sppo": Recipe("main_sppo", "sppo_ray_trainer", "sppo_trainer"),
}
LOOK = """
import contextlib, importlib, io, json, runpy, sys

seen = {}
for recipe, main, override in json.loads(sys.argv[1]):
    sys.argv = ["main", "--cfg", "job", override]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module(f"recipe.my_{recipe}.{main}", run_name="__main__", alter_sys=True)
    names = vars(importlib.import_module(f"recipe.my_{recipe}.{main}"))
    runners = [names[name] for name in names if name.endswith("TaskRunner") and name != "TaskRunner"]
    seen[recipe] = {
        "config": printed.getvalue(),
        "changed": [getattr(runner().trainer_class(), "changed", None) for runner in runners],
        "of_the_original": [name for name in sys.modules if name.startswith(f"recipe.{recipe}.")],
    }
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Copy every recipe, change a line of its trainer and one of its configuration, and start it with an override."""
    folder = tmp_path_factory.mktemp("copies")
    for name, recipe in RECIPES.items():
        copy = folder / "recipe" / f"my_{name}"
        shutil.copytree(ROOT / "recipe" / name, copy, ignore=shutil.ignore_patterns("__pycache__"))
        config = copy / "config" / f"{recipe.config}.yaml"
        node, line = "trainer", "default_local_dir: mine"
        if recipe.trainer is None:
            node, line = "custom_reward_function", "kept: mine"
        text, count = re.subn(rf"(?m)^{node}:$", f"{node}:\n  {line}", config.read_text())
        config.write_text(text if count else f"{text}\n{node}:\n  {line}\n")
        if recipe.trainer:
            trainer = copy / f"{recipe.trainer}.py"
            head = r"(?m)^class \w+Trainer\(.*\):$"
            text, count = re.subn(head, r"\g<0>\n    changed = True\n", trainer.read_text())
            assert count == 1, name
            trainer.write_text(text)
    wanted = json.dumps([[name, recipe.main, recipe.override] for name, recipe in RECIPES.items()])
    done = subprocess.run(
        [sys.executable, "-c", LOOK, wanted],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_a_copy_is_a_recipe_of_its_own(copies: dict[str, Any], name: str) -> None:
    seen, recipe = copies[name], RECIPES[name]
    key, _, value = recipe.override.rpartition(".")[2].partition("=")
    assert f"{key}: {value}" in seen["config"] and ": mine\n" in seen["config"]
    assert seen["changed"] == ([True] if recipe.trainer else [])
    assert not seen["of_the_original"] and f"recipe.{name}." not in seen["config"]
