"""What the recipe refuses before the start, and the keys of the main trainer that its own decide."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipe.dapo.main_dapo import DAPOTaskRunner
from recipe.one_step_off_policy.main_ppo import OneStepOffTaskRunner
from verl.base_config import ConfigError
from verl.trainer.config.keys import tree_of
from verl.trainer.config.rules.asynchronous import complete, refuse_two_numbers
from verl.trainer.config.rules.no_effect import idle_keys
from verl.trainer.config.validation import examined_config
from verl.trainer.main_ppo import FullyAsyncTaskRunner, check_mode

ROOT = Path(__file__).parents[3]
ROLLOUT = "actor_rollout_ref.rollout"
COMMON = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "algorithm.adv_estimator": "grpo",
    "data.train_files": __file__,
    "data.val_files": __file__,
}
DEFAULTS = ROOT / "recipe/fully_async_policy/config/fully_async.yaml"
NAMES = ("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer")


def composed(name: str = NAMES[0], folder: str = "recipe/fully_async_policy/config", **changes: Any) -> Any:
    with initialize_config_dir(str(ROOT / folder), version_base=None):
        return compose(name, [f"{key}={value}" for key, value in (COMMON | changes).items()])


def completed(name: str = NAMES[0], **changes: Any) -> Any:
    config = composed(name, **changes)
    complete(config)
    return config


@pytest.mark.parametrize("name", NAMES)
def test_the_configurations_pass_the_checks(name: str) -> None:
    run = examined_config(completed(name)).checked()
    assert run.prompts_per_step == 32 and run.async_training.is_async


def test_the_keys_that_follow() -> None:
    keys = {
        "rollout.n": 16,
        "rollout.nnodes": 2,
        "rollout.n_gpus_per_node": 4,
        "rollout.total_rollout_steps": 6400,
        "rollout.total_epochs": 3,
        "rollout.test_freq": 5,
        "async_training.require_batches": 2,
    }
    run = examined_config(completed(**keys)).checked()
    rollout = run.actor_rollout_ref.rollout
    assert (rollout.n, rollout.nnodes, rollout.n_gpus_per_node) == (16, 2, 4)
    assert run.data.train_batch_size == 64 and run.trainer.total_training_steps == 100
    assert run.trainer.total_epochs == 3 and run.trainer.test_freq == 20
    assert run.actor_rollout_ref.actor.use_rollout_log_probs
    other = {"async_training.use_rollout_log_probs": False, "rollout.test_freq": -1, "trainer.test_freq": 7}
    run = examined_config(completed(**other, **{"trainer.total_training_steps": 9})).checked()
    assert not run.actor_rollout_ref.actor.use_rollout_log_probs
    assert run.trainer.test_freq == 7 and run.trainer.total_training_steps == 9


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.train_batch_size", 48, "must be 0, or .* = 32"),
        ("actor_rollout_ref.hybrid_engine", True, "must be false: generation and training overlap"),
        (f"{ROLLOUT}.mode", "sync", "must be async"),
        (f"{ROLLOUT}.calculate_log_probs", False, "must be true"),
        (f"{ROLLOUT}.over_sample_rate", 0.1, "write 0"),
        ("async_training.replay", "/no/ledger.sqlite", "is no file: name the ledger"),
        ("algorithm.adv_estimator", "remax", "greedy baselines"),
        ("trainer.lazy_columns", True, "the ledger holds"),
        (f"{ROLLOUT}.skip_rollout", True, "write false, and async_training.replay"),
        ("async_training.mode", "half", "must be one of|sync"),
        ("async_training.staleness_threshold", -0.5, "at least 0|0 or more"),
    ],
)
def test_settings_that_forbid_overlap_are_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        examined_config(completed(**{key: value})).checked()
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("actor_rollout_ref.hybrid_engine", False, "must be true: servers and trainer take turns"),
        (f"{ROLLOUT}.mode", "sync", "must be async: only requests"),
        ("async_training.trigger_parameter_sync_step", 2, "must be 1: engines that take turns"),
        ("algorithm.adv_estimator", "remax", "greedy baselines"),
        (f"{ROLLOUT}.n", 8, None),
    ],
)
def test_settings_that_forbid_turns_are_refused(key: str, value: Any, words: str | None) -> None:
    turns = {
        "async_training.mode": "colocate_async",
        "async_training.trigger_parameter_sync_step": 1,
        "actor_rollout_ref.hybrid_engine": True,
        f"{ROLLOUT}.mode": "async",
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    }
    config = composed("ppo_trainer", "verl/trainer/config", **turns | {key: value, "data.train_batch_size": 0})
    complete(config)
    if words is None:
        assert examined_config(config).checked().async_training.takes_turns
        return
    with pytest.raises(ConfigError, match=words) as refused:
        examined_config(config).checked()
    assert key in str(refused.value)


def test_a_run_of_less_than_one_update_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.total_rollout_steps=31: must be 32 or more"):
        completed(**{"rollout.total_rollout_steps": 31})
    assert completed(**{"rollout.total_rollout_steps": 32}).trainer.total_training_steps == 1


def test_the_pace_has_no_effect_without_its_mode() -> None:
    keys = {f"{ROLLOUT}.n": 8, "async_training.staleness_threshold": 0.5, "async_training.partial_rollout": False}
    config = composed("ppo_trainer", "verl/trainer/config", **keys)
    idle = idle_keys(examined_config(config).checked(), tree_of(config))
    told = {violation.key for violation in idle if violation.key.startswith("async_training")}
    assert told == {"async_training.staleness_threshold", "async_training.partial_rollout"}
    config = completed(**{"async_training.staleness_threshold": 0.5})
    idle = idle_keys(examined_config(config).checked(), tree_of(config))
    assert not [violation for violation in idle if violation.key.startswith("async_training")]


def test_filters_of_groups_are_refused() -> None:
    """They are those of recipe.dapo."""
    keys = {"+algorithm.filter_groups.enable": True, "+algorithm.filter_groups.metric": "acc"}
    nodes = FullyAsyncTaskRunner.recipe_nodes
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups"):
        examined_config(completed(**keys), recipe_nodes=nodes).checked()
    with pytest.raises(ConfigError, match="staleness_treshold"):
        examined_config(completed(**{"+async_training.staleness_treshold": 1}), recipe_nodes=nodes).checked()


@pytest.mark.parametrize(
    ("runner", "mode", "words"),
    [
        (DAPOTaskRunner, "fully_async", "must be sync with this command"),
        (DAPOTaskRunner, "sync", None),
        (None, "sync", None),
        (FullyAsyncTaskRunner, "colocate_async", None),
        (OneStepOffTaskRunner, "one_step_off", None),
        (OneStepOffTaskRunner, "fully_async", "must be one_step_off with this command"),
    ],
)
def test_a_recipe_that_takes_turns_refuses_other_modes(runner: Any, mode: str, words: str | None) -> None:
    config = OmegaConf.create({"async_training": {"mode": mode}})
    if words is None:
        check_mode(config, runner)
        return
    with pytest.raises(ConfigError, match=rf"async_training\.mode={mode}: {words}"):
        check_mode(config, runner)


def test_the_main_configuration_takes_turns() -> None:
    run = examined_config(composed("ppo_trainer", "verl/trainer/config", **{f"{ROLLOUT}.n": 8})).checked()
    assert not run.async_training.is_async
    idle = {f"{ROLLOUT}.n": 8, "async_training.replay": __file__}
    with pytest.raises(ConfigError, match=r"async_training\.replay=.*needs the async_training\.mode"):
        examined_config(composed("ppo_trainer", "verl/trainer/config", **idle)).checked()


def test_two_numbers_of_devices_are_refused() -> None:
    for name in ("n_gpus_per_node", "n"):
        config = completed(**{f"rollout.{name}": 2, f"{ROLLOUT}.{name}": 3})
        with pytest.raises(ConfigError, match=rf"rollout\.{name}.*write one of the two"):
            refuse_two_numbers(config, DEFAULTS)
        refuse_two_numbers(completed(**{f"{ROLLOUT}.{name}": 3}), DEFAULTS)
