"""No key of a recipe's configuration is accepted and inert: code reads it, or a change is refused or told."""

import logging
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config import recipe_effects as effects
from tests.trainer.config import test_every_key_has_an_effect as main
from verl.base_config import ConfigError
from verl.trainer.config.keys import select
from verl.trainer.config.validation import examined_config

NAMES = list(effects.RECIPES)
TRAINED = [name for name in NAMES if name not in ("evaluation", "dapo_megatron_trainer")]


def unread_keys(name: str, always: bool = False) -> list[tuple[str, tuple[str, object] | None]]:
    """Return each unread key of a recipe with the condition; ``always`` leaves out those that have one."""
    return [
        (f"{entry.node}.{field}", entry.unless)
        for entry in effects.RECIPES[name].unread
        if not (always and entry.unless)
        for field in entry.names.split()
    ]


def read_keys(name: str) -> list[str]:
    return [key for reader in effects.RECIPES[name].readers for key in main.keys_of(reader)]


@pytest.fixture(scope="module")
def trees(composed: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Recipe -> its tree and the one that it starts from, without interpolation."""

    def raw(name: str, **where: Any) -> dict[str, Any]:
        tree: Any = OmegaConf.to_container(composed(name=name, base=False, **where), resolve=False)
        return tree

    return {
        name: (raw(name, folder=main.ROOT / recipe.folder / "config"), raw(recipe.base))
        for name, recipe in effects.RECIPES.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_adds_or_changes_is_in_the_table(trees: Any, name: str) -> None:
    tree, base = trees[name]
    keys, usual = set(main.leaves(tree)), set(main.leaves(base))
    read, never = read_keys(name), {key for key, _ in unread_keys(name, always=True)}
    assert len(read) == len(set(read)), "keys that stand in two rows"
    assert set(read) & never == set()
    assert keys - usual - set(read) - never == set(), "keys that nothing reads or refuses"
    below = {key.rpartition(".")[0] for key in keys}  # a mapping that is read as a whole
    assert (set(read) | never) - keys - below == set(), "keys that the YAML does not have"
    changed = {key for key in keys & usual if select(tree, key) != select(base, key)}
    offline = {key for rows in main.effects.OFFLINE.values() for reader in rows for key in main.keys_of(reader)}
    assert changed - set(read) - never - main.READ - offline == set()


@pytest.mark.parametrize("name", NAMES)
def test_keys_whose_reader_a_recipe_replaces_are_in_the_table(name: str) -> None:
    replaced = effects.RECIPES[name].replaced
    rows = [reader for reader in main.effects.READERS if (reader.file, reader.expression) in replaced]
    assert {(reader.file, reader.expression) for reader in rows} == set(replaced), "readers that are not in the table"
    orphans = {key for reader in rows for key in main.keys_of(reader) if not key.startswith("critic.")}  # none trains
    assert orphans - set(read_keys(name)) - {key for key, _ in unread_keys(name, always=True)} == set()


def test_readers_read_what_they_are_said_to_and_their_tests_exist() -> None:
    wrong = main.wrong_rows([reader for recipe in effects.RECIPES.values() for reader in recipe.readers])
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def runs(composed: Any) -> dict[str, DictConfig]:
    """Recipe -> the configuration of a small run."""
    more = {"prime_trainer": ["reward_model.micro_batch_size_per_gpu=2", "data.oversample_factor=2.0"]}
    folders = {name: main.ROOT / effects.RECIPES[name].folder / "config" for name in TRAINED}
    return {name: composed(*more.get(name, ()), name=name, folder=folders[name]) for name in TRAINED}


def notice(config: DictConfig, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="verl.trainer.config.validation"):
        examined_config(config, recipe_nodes=("algorithm.filter_groups",)).checked()
    return caplog.text


@pytest.mark.parametrize("name", TRAINED)
def test_no_default_of_a_recipe_is_without_effect(runs: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert "without effect" not in notice(runs[name], caplog)


@pytest.mark.parametrize("name", [name for name in TRAINED if unread_keys(name)])
def test_a_change_of_what_nothing_reads_is_refused_or_told(
    runs: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """All changes at once: a refusal lists them, and without the refused ones the notice names the others."""
    entries = unread_keys(name)
    for unless in dict.fromkeys(condition for _, condition in entries):
        keys = [key for key, condition in entries if condition == unless]
        refused, told = set(), ""
        for _ in range(2):
            config = runs[name].copy()
            if unless:
                OmegaConf.update(config, *unless)
            for key in set(keys) - refused:
                OmegaConf.update(config, key, effects.ANOTHER[key.rpartition(".")[2]])
            try:
                told = notice(config, caplog)
            except ConfigError as error:
                refused |= {violation.key for violation in error.violations}
        silent = {key for key in keys if key not in refused and f"{key}=" not in told}
        assert silent == set(), (unless, told)
