"""The configuration of the SPIN recipe: composition, and what is refused before anything starts."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import validate_config
from verl.trainer.ppo.utils import need_critic

ROOT = Path(__file__).resolve().parents[3]
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def base(composed):
    return composed("actor_rollout_ref.rollout.name=vllm", name="spin_trainer", folder=ROOT / "recipe/spin/config")


def violations(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, RunConfig.parse(config).needs_reference, need_critic(config))
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


def test_what_is_right(base):
    assert violations(base, {}) == {}
    assert violations(base, {"trainer.key_of_a_fork": 1, "trainer.ref_update_freq": 0}) == {}
    assert violations(base, {f"{ACTOR}.dpo_loss_type": "ipo"}) == {}


def test_the_reference_lives_with_the_policy_and_there_is_no_critic(base):
    run = RunConfig.parse(base)
    assert run.needs_reference and run.actor_rollout_ref.reference_is_in_actor and run.critic is None
    assert (run.actor_rollout_ref.actor.dpo_beta, run.actor_rollout_ref.actor.optim.lr_warmup_steps) == (0.1, 15)
    assert (run.trainer.ref_update_freq, run.actor_rollout_ref.rollout.val_kwargs.n) == (1, 2)


WRONG = {
    f"{ACTOR}.clip_ratio": (0.3, "is not read: SPIN has its own loss"),
    f"{ACTOR}.entropy_coeff": (0.01, "is not read"),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", "write vanilla, and choose dpo_loss_type"),
    f"{ACTOR}.dpo_beta": (0, "must be a number above 0"),
    f"{ACTOR}.dpo_label_smoothing": (0.5, "must be a number in [0, 0.5)"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (None, "set log_prob_micro_batch_size_per_gpu"),
    "algorithm.adv_estimator": ("grpo", "must be null"),
    "algorithm.use_kl_in_reward": (True, "is not read"),
    "algorithm.rollout_is": (True, "no importance weights"),
    "trainer.critic_warmup": (1, "SPIN has no critic to wait for"),
    "trainer.balance_batch": (True, "SPIN keeps the responses of a pair together"),
    "trainer.ref_update_freq": (-1, "of 0 or more"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_wrong_is_named(base, key):
    value, message = WRONG[key]
    found = violations(base, {key: value})
    assert message in found[key], found


def test_sglang_is_the_default_and_waits(composed):
    config = composed(name="spin_trainer", folder=ROOT / "recipe/spin/config", base=False)
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
