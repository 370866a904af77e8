"""The configurations of the SPIN and SPPO recipes: composition, and what is refused before anything starts."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import validate_config
from verl.trainer.ppo.utils import need_critic

ROOT = Path(__file__).resolve().parents[3]
ACTOR = "actor_rollout_ref.actor"
RECIPES = ("spin", "sppo")


@pytest.fixture(scope="module")
def bases(composed):
    """Recipe -> its configuration with an engine that is supported."""
    override = "actor_rollout_ref.rollout.name=vllm"
    return {name: composed(override, name=f"{name}_trainer", folder=folder_of(name)) for name in RECIPES}


def folder_of(recipe):
    return ROOT / "recipe" / recipe / "config"


def violations(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, RunConfig.parse(config).needs_reference, need_critic(config))
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


RIGHT = [
    ("spin", {}),
    ("spin", {"trainer.key_of_a_fork": 1, "trainer.ref_update_freq": 0}),
    ("spin", {f"{ACTOR}.dpo_loss_type": "ipo"}),
    ("sppo", {}),
    ("sppo", {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01}),
]


@pytest.mark.parametrize(("recipe", "changes"), RIGHT)
def test_what_is_right(bases, recipe, changes):
    assert violations(bases[recipe], changes) == {}


def test_the_reference_of_spin_lives_with_the_policy_and_there_is_no_critic(bases):
    run = RunConfig.parse(bases["spin"])
    assert run.needs_reference and run.actor_rollout_ref.reference_is_in_actor and run.critic is None
    assert (run.actor_rollout_ref.actor.dpo_beta, run.actor_rollout_ref.actor.optim.lr_warmup_steps) == (0.1, 15)
    assert (run.trainer.ref_update_freq, run.actor_rollout_ref.rollout.val_kwargs.n) == (1, 2)


def test_sppo_has_its_loss_and_no_critic(bases):
    run = RunConfig.parse(bases["sppo"])
    assert (run.actor_rollout_ref.actor.sppo_eta, run.algorithm.sppo_eta) == (1.0, 1.0)
    assert run.actor_rollout_ref.actor.policy_loss.loss_mode == "sppo" and run.critic is None
    assert run.actor_rollout_ref.actor.optim.lr_warmup_steps == 15


WRONG_IN_SPIN = {
    f"{ACTOR}.clip_ratio": (0.3, "is not read: SPIN has its own loss"),
    f"{ACTOR}.entropy_coeff": (0.01, "is not read"),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", "write vanilla, and choose dpo_loss_type"),
    f"{ACTOR}.shuffle": (True, "SPIN keeps the responses of a pair together"),
    f"{ACTOR}.dpo_beta": (0, "must be a number above 0"),
    f"{ACTOR}.dpo_label_smoothing": (0.5, "must be a number in [0, 0.5)"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (None, "set log_prob_micro_batch_size_per_gpu"),
    "algorithm.adv_estimator": ("grpo", "must be null"),
    "algorithm.use_kl_in_reward": (True, "is not read"),
    "algorithm.rollout_is": (True, "no importance weights"),
    "algorithm.rollout_is_threshold": (2.0, "no importance weights"),
    "trainer.critic_warmup": (1, "SPIN has no critic to wait for"),
    "trainer.balance_batch": (True, "SPIN keeps the responses of a pair together"),
    "trainer.ref_update_freq": (-1, "of 0 or more"),
}
WRONG_IN_SPPO = {
    f"{ACTOR}.clip_ratio": (0.3, "SPPO does not clip. Write 0.2"),
    f"{ACTOR}.loss_agg_mode": ("seq-mean-token-mean", "must be token-mean"),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", "must be sppo"),
    f"{ACTOR}.sppo_eta": (0, "must be a number above 0"),
    "algorithm.sppo_eta": (-1, "must be a number above 0"),
    "algorithm.adv_estimator": ("grpo", "must be null"),
    "algorithm.rollout_is": (True, "is not supported"),
}
WRONG = [("spin", key) for key in WRONG_IN_SPIN] + [("sppo", key) for key in WRONG_IN_SPPO]


@pytest.mark.parametrize(("recipe", "key"), WRONG)
def test_what_is_wrong_is_named(bases, recipe, key):
    value, message = {"spin": WRONG_IN_SPIN, "sppo": WRONG_IN_SPPO}[recipe][key]
    found = violations(bases[recipe], {key: value})
    assert message in found[key], found


@pytest.mark.parametrize("recipe", RECIPES)
def test_sglang_is_the_default_and_waits(composed, recipe):
    config = composed(name=f"{recipe}_trainer", folder=folder_of(recipe), base=False)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.val_kwargs.n) == ("sglang", 2, 2)
