"""The configuration of the SPPO recipe: composition, and what is refused before anything starts."""

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
    return composed("actor_rollout_ref.rollout.name=vllm", name="sppo_trainer", folder=ROOT / "recipe/sppo/config")


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
    assert violations(base, {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01}) == {}
    run = RunConfig.parse(base)
    assert (run.actor_rollout_ref.actor.sppo_eta, run.algorithm.sppo_eta) == (1.0, 1.0)
    assert run.actor_rollout_ref.actor.policy_loss.loss_mode == "sppo" and run.critic is None
    assert run.actor_rollout_ref.actor.optim.lr_warmup_steps == 15


WRONG = {
    f"{ACTOR}.clip_ratio": (0.3, "SPPO does not clip. Write 0.2"),
    f"{ACTOR}.loss_agg_mode": ("seq-mean-token-mean", "must be token-mean"),
    f"{ACTOR}.policy_loss.loss_mode": ("gspo", "must be sppo"),
    f"{ACTOR}.sppo_eta": (0, "must be a number above 0"),
    "algorithm.sppo_eta": (-1, "must be a number above 0"),
    "algorithm.adv_estimator": ("grpo", "must be null"),
    "algorithm.rollout_is": (True, "is not supported"),
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_wrong_is_named(base, key):
    value, message = WRONG[key]
    found = violations(base, {key: value})
    assert message in found[key], found


def test_sglang_is_the_default_and_waits(composed):
    config = composed(name="sppo_trainer", folder=ROOT / "recipe/sppo/config", base=False)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.val_kwargs.n) == ("sglang", 2, 2)
