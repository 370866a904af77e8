"""What the checks before the start leave to the code of a fork, which alone can know."""

import pytest
from omegaconf import OmegaConf

from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY, register_adv_est
from verl.base_config import ConfigError
from verl.trainer.config.rules.files import may_register
from verl.trainer.config.validation import examined_config
from verl.utils.config import validate_config

MINE = {
    "algorithm.adv_estimator": "mine",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "mine",
    "reward_model.reward_manager": "mine",
}


def changed(config, changes):
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def refused(config, **options):
    try:
        examined_config(config, **options).checked()
    except ConfigError as error:
        return [violation.key for violation in error.violations]
    return []


def test_a_fork_may_add_keys_register_names_and_draw_prompts(composed):
    own = {"algorithm.my_key": 1, "algorithm.filter_groups": {"enable": True, "metric": "acc"}}
    config = changed(composed(), MINE | own)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert sorted(refused(config, use_critic=False)) == sorted(
        [*MINE, "algorithm.my_key", "algorithm.filter_groups.enable"]
    )


def test_other_faults_of_a_fork_are_refused(composed):
    config = changed(composed(), {"data.truncation": "cut", "algorithm.gamma": "much"})
    assert refused(config, of_fork=True) == refused(config) and len(refused(config)) == 2


def test_a_name_that_the_launching_module_has_registered_passes(composed, monkeypatch):
    config = changed(composed(), {"algorithm.adv_estimator": "mine"})
    assert refused(config, use_critic=False) == ["algorithm.adv_estimator"]
    monkeypatch.setattr("verl.algos.advantage.ADV_ESTIMATOR_REGISTRY", dict(ADV_ESTIMATOR_REGISTRY))
    register_adv_est("mine")(lambda token_level_rewards: (token_level_rewards, token_level_rewards))
    assert refused(config, use_critic=False) == []


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("from verl.workers.reward_manager import register\n\n\n@register('mine')\nclass M: ...\n", True),
        ("import verl.workers.reward_manager as r\n\n\n@r.register('mine')\nclass M: ...\n", True),
        ("import my_managers\n", True),
        ("import re\nfrom verl import DataProto\n", False),
        ("def f(:", False),
    ],
)
def test_the_file_of_the_reward_function_may_register_a_manager(composed, tmp_path, source, may):
    file = tmp_path / "reward.py"
    file.write_text(source + "\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n")
    assert may_register(str(file)) is may
    own = {"reward_model.reward_manager": "mine", "custom_reward_function.path": str(file)}
    assert ("reward_model.reward_manager" in refused(changed(composed(), own))) is not may


def test_a_data_set_of_the_user_finds_its_rows_itself(composed, tmp_path):
    (tmp_path / "data.py").write_text("class Rows: ...\n")
    custom = {"data.custom_cls.path": str(tmp_path / "data.py"), "data.custom_cls.name": "Rows"}
    files = {"data.train_files": str(tmp_path), "data.val_files": "table_of_a_database"}
    assert refused(changed(composed(), files)) == ["data.train_files", "data.val_files"]
    assert refused(changed(composed(), files | custom)) == []
