"""From trees to dataclasses."""

from fractions import Fraction

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.utils.config import omega_conf_to_dataclass, update_dict_with_config
from verl.workers.config import FSDPOptimizerConfig, MultiTurnConfig, RolloutConfig, SamplingConfig


def test_target_names_the_class_and_children_are_built():
    tree = OmegaConf.create(
        {
            "_target_": "verl.workers.config.RolloutConfig",
            "name": "vllm",
            "n": "${.other}",
            "other": 3,
            "engine_kwargs": {"vllm": {"seed": None}},
            "val_kwargs": {"_target_": "verl.workers.config.SamplingConfig", "n": 4},
        }
    )
    with pytest.raises(Exception, match="other"):  # not a field of the class
        omega_conf_to_dataclass(tree)
    tree.n, _ = 3, tree.pop("other")
    built = omega_conf_to_dataclass(tree)
    assert isinstance(built, RolloutConfig) and built.n == 3
    assert built.val_kwargs == SamplingConfig(n=4)
    assert type(built.engine_kwargs) is dict and built.engine_kwargs == {"vllm": {"seed": None}}


def test_a_given_class_fills_defaults():
    built = omega_conf_to_dataclass(OmegaConf.create({"lr": 3e-4, "betas": [0.8, 0.9]}), FSDPOptimizerConfig)
    assert (built.lr, tuple(built.betas), built.lr_scheduler_type) == (3e-4, (0.8, 0.9), "constant")


def test_empty_foreign_and_wrong_inputs():
    assert omega_conf_to_dataclass(None) is None
    assert omega_conf_to_dataclass(OmegaConf.create({})) is None
    assert omega_conf_to_dataclass({}, SamplingConfig) == SamplingConfig()
    built = SamplingConfig()
    assert omega_conf_to_dataclass(built) is built
    with pytest.raises(AssertionError, match="_target_"):
        omega_conf_to_dataclass({"lr": 1.0})
    with pytest.raises(ValueError, match="must be a dataclass"):
        omega_conf_to_dataclass({"lr": 1.0}, dict)


def test_what_a_dataclass_refuses_is_raised_as_it_is():
    with pytest.raises(ConfigError, match=r"lr=-1: must be a number in \[0, 100\]") as info:
        omega_conf_to_dataclass({"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": -1})
    assert [violation.key for violation in info.value.violations] == ["lr"]


def test_other_targets_are_called_as_hydra_does():
    fraction = {"_target_": "fractions.Fraction", "numerator": 3}
    assert omega_conf_to_dataclass(fraction) == Fraction(3)
    assert omega_conf_to_dataclass({"_target_": "os.path.join", "_args_": ["a", "b"]}) == "a/b"
    assert omega_conf_to_dataclass({**fraction, "_partial_": True})(denominator=2) == Fraction(3, 2)
    sampling = {"_target_": "verl.workers.config.SamplingConfig", "n": 4}
    assert omega_conf_to_dataclass({**sampling, "_partial_": True})() == SamplingConfig(n=4)
    rollout = {"_target_": "verl.workers.config.RolloutConfig", "name": "vllm"}
    built = omega_conf_to_dataclass(
        OmegaConf.create({**rollout, "engine_kwargs": {"vllm": {"hf_overrides": fraction}}})
    )
    assert built.engine_kwargs == {"vllm": {"hf_overrides": Fraction(3)}}
    with pytest.raises(ConfigError, match="n=x: must be an integer"):
        omega_conf_to_dataclass({"_target_": "types.SimpleNamespace", "sampling": {**sampling, "n": "x"}})


def test_keys_of_recipes_in_a_plain_node_are_kept():
    rollout = {"_target_": "verl.workers.config.RolloutConfig", "name": "vllm"}
    node = omega_conf_to_dataclass({**rollout, "multi_turn": {"max_user_turns": 4, "of_a_recipe": 5}}).multi_turn
    assert node == MultiTurnConfig(max_user_turns=4)
    assert node["of_a_recipe"] == node.get("of_a_recipe") == 5


def test_update_dict_takes_what_is_there():
    values = {"n": 0, "absent": 1}
    update_dict_with_config(values, SamplingConfig(n=5))
    assert values == {"n": 5, "absent": 1}
