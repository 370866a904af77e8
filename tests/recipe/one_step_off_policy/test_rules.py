"""What the recipe refuses before the start, and that its configurations are those of the main trainer otherwise."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from recipe.one_step_off_policy.main_ppo import OneStepOffTaskRunner, refuse_two_numbers
from verl.base_config import ConfigError
from verl.trainer.config.overrides import prepare_arguments
from verl.trainer.config.validation import examined_config

ROOT = Path(__file__).parents[3]
ROLLOUT = "actor_rollout_ref.rollout"
COMMON = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.n": 8,
    "algorithm.adv_estimator": "grpo",
    "data.train_files": __file__,
    "data.val_files": __file__,
}
DEFAULTS = ROOT / "recipe/one_step_off_policy/config/one_step_off.yaml"
NAMES = ("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer")


def composed(name: str = NAMES[0], folder: str = "recipe/one_step_off_policy/config", **changes: Any) -> Any:
    keys = COMMON | changes
    with initialize_config_dir(str(ROOT / folder), version_base=None):
        return compose(name, [f"{key}={value}" for key, value in keys.items()])


def check(config: Any) -> Any:
    nodes, rules = OneStepOffTaskRunner.recipe_nodes, OneStepOffTaskRunner.recipe_rules
    return examined_config(config, recipe_nodes=nodes, recipe_rules=rules).checked()


@pytest.mark.parametrize("name", NAMES)
def test_the_configurations_pass_the_checks(name: str) -> None:
    shared = check(composed(name)).actor_rollout_ref
    assert not shared.hybrid_engine and shared.rollout.serves
    assert (shared.rollout.nnodes, shared.rollout.n_gpus_per_node) == (1, 8)


def test_the_configuration_of_the_search_passes_too() -> None:
    config = composed("search_multiturn_grpo_one_step_off", "examples/sglang_multiturn/config")
    assert check(config).actor_rollout_ref.rollout.default_loop == "tool_agent"


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("actor_rollout_ref.hybrid_engine", True, "must be false: generation and training overlap"),
        (f"{ROLLOUT}.mode", "sync", "must be async: standalone servers answer request by request"),
        ("algorithm.adv_estimator", "remax", "write another estimator such as rloo"),
        (f"{ROLLOUT}.skip_rollout", True, "write false, and async_training.replay"),
        ("trainer.lazy_columns", True, "the ledger holds"),
        ("async_training.mode", "sync", "must be one_step_off in this recipe"),
        ("async_training.staleness_threshold", 0.5, "is 1.0 with async_training.mode=one_step_off"),
        ("async_training.trigger_parameter_sync_step", 2, "is 1 with async_training.mode=one_step_off"),
        ("async_training.max_off_policy_threshold", 3, "is 1 with async_training.mode=one_step_off"),
        ("async_training.off_policy_strategy", "drop", "is wait with async_training.mode=one_step_off"),
        (f"{ROLLOUT}.over_sample_rate", 0.1, "write 0"),
        (f"{ROLLOUT}.n_gpus_per_node", 3, "must be a multiple of tensor_model_parallel_size"),
        (f"{ROLLOUT}.name", "hf", "has no server with name=hf"),
    ],
)
def test_what_cannot_run_is_refused_with_the_key(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(composed(**{key: value}))
    (told,) = [each for each in refused.value.violations if each.key in (key, f"{ROLLOUT}.mode")]
    assert expected in str(told)
    if told.key == key:
        assert str(value).lower() in str(told)
    if not expected.startswith("has no"):
        assert len(refused.value.violations) == 1


def test_the_established_keys_give_the_devices_of_the_servers() -> None:
    config = composed(**{"rollout.nnodes": 2, "rollout.n_gpus_per_node": 4})
    refuse_two_numbers(config, DEFAULTS)
    shared = check(config).actor_rollout_ref
    assert (shared.rollout.nnodes, shared.rollout.n_gpus_per_node) == (2, 4)
    words = ["rollout.nnodes=2", "rollout.n_gpus_per_node=4"]
    fitted = prepare_arguments(words, NAMES[0], str(ROOT / "recipe/one_step_off_policy/config"))
    assert fitted == words
    refuse_two_numbers(composed(**{f"{ROLLOUT}.nnodes": 2}), DEFAULTS)
    with pytest.raises(ConfigError, match=r"rollout\.nnodes=2: .*actor_rollout_ref\.rollout\.nnodes=3"):
        refuse_two_numbers(composed(**{f"{ROLLOUT}.nnodes": 3, "rollout.nnodes": 2}), DEFAULTS)


def test_dynamic_sampling_is_refused() -> None:
    """A step of DAPO draws until it is full: what the next step draws is not known before."""
    config = composed(**{"+algorithm.filter_groups.enable": True, "+algorithm.filter_groups.metric": "acc"})
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups"):
        check(config)


def test_keys_that_do_not_exist_are_refused_as_in_the_main_trainer() -> None:
    with pytest.raises(ConfigError, match="n_gpu_per_node"):
        check(composed(**{f"+{ROLLOUT}.n_gpu_per_node": 2}))
