"""The losses of the recipe, by its configuration, where theory says that they equal plain ones."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from verl.algos.aggregate import agg_loss
from verl.algos.policy_loss import Whole, get_policy_loss_fn, token_covariances
from verl.trainer.config.run_config import RunConfig
from verl.workers.config import ActorConfig

CONFIG = Path(__file__).resolve().parents[3] / "recipe" / "entropy" / "config"
LOSS = "actor_rollout_ref.actor.policy_loss"
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NOTHING = [f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_lb=1e6", f"{LOSS}.clip_cov_ub=2e6"]
LIMITS = ["actor_rollout_ref.actor.clip_ratio_low=0.2", "actor_rollout_ref.actor.clip_ratio_high=0.3"]
NO_DUAL_CLIP = "actor_rollout_ref.actor.clip_ratio_c=1e6"


def actor(*overrides: str) -> ActorConfig:
    """The actor's node of the recipe's configuration, as the workers get it."""
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("entropy_trainer", overrides=list(overrides))
    return RunConfig.parse(config).actor_rollout_ref.actor


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Return tokens far enough from the old policy that the ratios of many are clipped, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    old, step, advantages = torch.randn(3, 6, 9, generator=generator, dtype=torch.float64).unbind()
    mask = (torch.rand(6, 9, generator=generator) < 0.8).long()
    return {"old_log_prob": old - 3, "log_prob": old - 3 + 0.5 * step, "advantages": advantages, "response_mask": mask}


def loss_and_gradient(loss, tensors: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    leaf = tensors["log_prob"].clone().requires_grad_()
    value = loss(**tensors | {"log_prob": leaf})
    value.backward()
    return value.item(), leaf.grad


def of_config(config: ActorConfig, mode: str):
    fn = get_policy_loss_fn(config.policy_loss.loss_mode)
    return lambda **tensors: fn(**tensors, loss_agg_mode=mode, config=config)[0]


def assert_equal(config: ActorConfig, plain, mode: str, tensors: dict[str, torch.Tensor]) -> None:
    loss, gradient = loss_and_gradient(of_config(config, mode), tensors)
    expected, slope = loss_and_gradient(plain, tensors)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient.count_nonzero() > 0
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_that_selects_nothing_is_two_sided_clipping(mode: str, seed: int) -> None:
    tensors = batch(seed)

    def two_sided(old_log_prob, log_prob, advantages, response_mask):
        ratio = (log_prob - old_log_prob).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.3)
        return agg_loss(torch.maximum(-advantages * ratio, -advantages * clipped), response_mask, mode)

    config = actor(*NOTHING, *LIMITS)
    assert_equal(config, two_sided, mode, tensors)
    ratio = (tensors["log_prob"] - tensors["old_log_prob"]).exp()
    assert ((ratio > 1.3) & (tensors["advantages"] > 0)).any() and ((ratio < 0.8) & (tensors["advantages"] < 0)).any()
    assert_equal(config, of_config(actor(*LIMITS, NO_DUAL_CLIP), mode), mode, tensors)  # vanilla


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_without_a_coefficient_is_the_unclipped_surrogate(mode: str, seed: int) -> None:
    def surrogate(old_log_prob, log_prob, advantages, response_mask):
        return agg_loss(-advantages * (log_prob - old_log_prob).exp(), response_mask, mode)

    config = actor(f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.ppo_kl_coef=0", f"{LOSS}.kl_cov_ratio=0.3")
    assert_equal(config, surrogate, mode, batch(seed))


def test_the_bounds_decide_between_the_two() -> None:
    """With the paper's bounds and a large share, the same tokens have another loss."""
    tensors = batch(0)
    torch.manual_seed(0)
    values, _ = token_covariances(tensors["log_prob"], tensors["advantages"], tensors["response_mask"], Whole())
    assert (values > 1).any()
    some = actor(f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_ratio=0.5", *LIMITS)
    none = actor(*NOTHING, *LIMITS)
    assert loss_and_gradient(of_config(some, MODES[0]), tensors)[0] != pytest.approx(
        loss_and_gradient(of_config(none, MODES[0]), tensors)[0]
    )
