"""Import paths of later versions: names that are here, reasons for those that are not, and commands."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from verl.compat.facades import FACADES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", FACADES)
def test_a_facade_has_its_names_and_says_why_others_are_absent(module: str) -> None:
    loaded = importlib.import_module(module)
    facade = FACADES[module]
    for name, place in facade.names.items():
        where, _, other = place.partition(":")
        assert getattr(loaded, name) is getattr(importlib.import_module(where), other or name)
    for name, reason in facade.absent.items():
        with pytest.raises(ImportError, match="is not here") as info:
            exec(f"from {module} import {name}", {})
        assert reason in str(info.value)
    with pytest.raises(AttributeError):
        _ = loaded.no_such_name
    with pytest.raises(ImportError):
        exec(f"from {module} import no_such_name", {})


def test_every_module_that_imports_the_package_is_in_the_table() -> None:
    def name(path: Path) -> str:
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    users = {name(path) for path in (ROOT / "verl").rglob("*.py") if "from verl.compat" in path.read_text()}
    assert {each for each in users if not each.startswith("verl.compat")} == set(FACADES)


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("verl.trainer.main_ppo_sync", "actor_rollout_ref.rollout.*"),
        ("verl.trainer.sft_trainer_ray", "engine: "),
        ("verl.experimental.one_step_off_policy.main_ppo", "actor_rollout_ref.rollout.*"),
    ],
)
def test_a_command_is_the_same_under_both_paths(module: str, keys: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m" in done.stdout and keys.rstrip("*. ").rpartition(".")[2] in done.stdout
