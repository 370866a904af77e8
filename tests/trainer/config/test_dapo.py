# ruff: noqa: E501 (one case per line reads as a table)
"""The configuration of the DAPO recipe: composition, and what is refused before anything starts."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.dapo.main_dapo import DAPOTaskRunner
from verl.base_config import ConfigError, UnsupportedConfigError
from verl.trainer.config.validation import validate_config
from verl.utils.config import omega_conf_to_dataclass

ROOT = Path(__file__).resolve().parents[3]
GROUPS, BUFFER = "algorithm.filter_groups", "reward_model.overlong_buffer"
FILTER = {f"{GROUPS}.enable": True, f"{GROUPS}.metric": "acc", "algorithm.adv_estimator": "grpo"}
PUNISH = {f"{BUFFER}.enable": True, f"{BUFFER}.len": 4, f"{BUFFER}.penalty_factor": 1.0}


@pytest.fixture(scope="module")
def base(composed):
    return composed(name="dapo_trainer", folder=ROOT / "recipe/dapo/config")


def violations(base, changes, recipe_nodes=DAPOTaskRunner.recipe_nodes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, False, False, recipe_nodes)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def test_it_adds_its_keys_to_the_main_configuration(base, composed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it is composed from anywhere
    main = OmegaConf.to_container(composed(), resolve=False)
    tree = OmegaConf.to_container(base, resolve=False)
    assert tree["data"].pop("gen_batch_size") == "${data.train_batch_size}" and base.data.gen_batch_size == 8
    assert tree["reward_model"].pop("overlong_buffer") == {
        "enable": False,
        "len": 0,
        "penalty_factor": 0.0,
        "log": False,
    }
    assert tree["algorithm"]["filter_groups"].pop("_target_") == "verl.trainer.config.FilterGroupsConfig"
    assert tree["algorithm"].pop("filter_groups") == {"enable": False, "metric": None, "max_num_gen_batches": 0}
    assert tree["reward_model"]["reward_manager"] == "dapo" and tree["trainer"]["project_name"] == "verl-dapo"
    main["reward_model"]["reward_manager"], main["trainer"]["project_name"] = "dapo", "verl-dapo"
    assert tree == main
    assert omega_conf_to_dataclass(base.algorithm).filter_groups.max_num_gen_batches == 0


def test_what_is_right(base):
    assert violations(base, {}) == {}
    assert violations(base, FILTER | PUNISH | {"data.gen_batch_size": 2}) == {}
    assert (
        violations(
            base, {f"{BUFFER}.enable": True, f"{BUFFER}.len": 16, f"{BUFFER}.log": True, f"{BUFFER}.penalty_factor": 0}
        )
        == {}
    )
    assert violations(base, PUNISH | {"reward_model.reward_kwargs": {}}) == {}
    given = {"max_resp_len": 16, "overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1.0}}
    assert violations(base, {"reward_model.reward_kwargs": given}) == {}
    assert violations(base, FILTER | {"algorithm.use_kl_in_reward": True}) == {}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({**FILTER, f"{GROUPS}.metric": None}, f"{GROUPS}.metric", "write acc, score, seq_reward"),
        ({**FILTER, f"{GROUPS}.metric": 3}, f"{GROUPS}.metric", "must be a string"),
        ({**FILTER, f"{GROUPS}.max_num_gen_batches": 0.5}, f"{GROUPS}.max_num_gen_batches", "must be an integer"),
        ({f"{GROUPS}.max_gen_batches": 3}, f"{GROUPS}.max_gen_batches", "the nearest in this node: max_num_gen_batches"),
        ({**FILTER, f"{GROUPS}.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True}, f"{GROUPS}.metric", "write seq_reward"),
        ({**PUNISH, f"{BUFFER}.len": 0}, f"{BUFFER}.len", "[1, data.max_response_length=16]"),
        ({**PUNISH, f"{BUFFER}.len": 17}, f"{BUFFER}.len", "[1, data.max_response_length=16]"),
        ({**PUNISH, f"{BUFFER}.len": "4"}, f"{BUFFER}.len", "must be an integer"),
        ({**PUNISH, f"{BUFFER}.penalty_factor": 0}, f"{BUFFER}.penalty_factor", "must be above 0"),
        ({**PUNISH, f"{BUFFER}.penalty_factor": -1.0, f"{BUFFER}.log": True}, f"{BUFFER}.penalty_factor", "must be above 0"),
        ({f"{BUFFER}.enable": "yes"}, f"{BUFFER}.enable", "must be true or false"),
        ({f"{BUFFER}.length": 3}, f"{BUFFER}.length", "the nearest in this node: len"),
        ({"reward_model.overlong_buffer": True}, "reward_model.overlong_buffer", "must be a mapping"),
        ({**PUNISH, "reward_model.reward_manager": "naive"}, "reward_model.reward_manager", "write dapo"),
        ({**PUNISH, "reward_model.reward_kwargs": {"max_resp_len": 16}}, "reward_model.reward_kwargs.max_resp_len", "write one of the two"),
        ({"reward_model.reward_kwargs": {"max_resp_len": 16, "overlong_buffer_cfg": {"enable": True, "len": 17, "penalty_factor": 1}}}, "reward_model.reward_kwargs.overlong_buffer_cfg.len", "[1, reward_model.reward_kwargs.max_resp_len=16]"),
        ({"reward_model.reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4, "penalty_factor": 1}}}, "reward_model.reward_kwargs.max_resp_len", "overlong_buffer_cfg needs it"),
        ({"data.gen_batch_size": 12}, "actor_rollout_ref.actor.ppo_mini_batch_size", "must divide data.gen_batch_size=12"),
        ({"data.gen_batch_size": 4}, "actor_rollout_ref.actor.ppo_mini_batch_size", "at most data.gen_batch_size=4"),
    ],
)  # fmt: skip
def test_refused(base, changes, key, message):
    found = violations(base, changes)
    assert message in found.get(key, ""), found


def test_the_main_trainer_has_the_buffer_and_names_the_recipe_for_the_rest(base, composed):
    assert violations(composed(), PUNISH | {"reward_model.reward_manager": "dapo"}, ()) == {}
    with pytest.raises(UnsupportedConfigError, match=r"python -m recipe\.dapo\.main_dapo: write false"):
        config = OmegaConf.merge(base, {"algorithm": {"filter_groups": {"enable": True, "metric": "acc"}}})
        validate_config(config, False, False)


def test_keys_without_effect_are_told(base, caplog):
    caplog.set_level("WARNING", logger="verl.trainer.config.validation")
    idle = {f"{GROUPS}.metric": "acc", f"{BUFFER}.len": 4}
    assert violations(base, idle) == {}
    (message,) = caplog.messages
    assert f"{GROUPS}.metric=acc ({GROUPS}.enable=false)" in message and f"{BUFFER}.len=4" in message
    caplog.clear()
    single = {"actor_rollout_ref.rollout.n": 1, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1}
    assert violations(base, FILTER | single) == {}
    assert f"{GROUPS}.enable=true (actor_rollout_ref.rollout.n=1)" in caplog.text
