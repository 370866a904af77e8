"""An option of an estimator or a loss changes what it computes, or a notice says that it has no effect."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.algos.advantage import estimate_advantages
from verl.algos.names import ADV_ESTIMATORS, POLICY_LOSSES
from verl.algos.policy_loss import get_policy_loss_fn
from verl.trainer.config.validation import validate_config
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

ACTOR = "actor_rollout_ref.actor"
ROWS, WIDTH = 8, 6


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def told(base: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]) -> str:
    """Return the notice about keys without effect that a configuration with these changes gives."""
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="verl.trainer.config.validation"):
        validate_config(config, use_reference_policy=False, use_critic=False)
    return caplog.text


@pytest.fixture(scope="module")
def base(composed: Any) -> Any:
    return composed("algorithm.adv_estimator=grpo")


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_options_of_estimators(base: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    options = {"gamma": 0.5, "lam": 0.5, "norm_adv_by_std_in_grpo": False}
    scores = draw(3, ROWS, WIDTH)
    inputs = {
        "token_level_rewards": scores[0],
        "values": scores[1],
        "reward_baselines": scores[2, :, 0],
        "response_mask": torch.ones(ROWS, WIDTH, dtype=torch.long),
        "index": np.arange(ROWS) // 4,
    } | {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    usual = estimate_advantages(name, **inputs)
    changes = {f"algorithm.{option}": value for option, value in options.items()}
    notice = told(base, caplog, {"algorithm.adv_estimator": name} | changes)
    for option, value in options.items():
        found = estimate_advantages(name, **inputs | {option: value})
        is_read = any(not torch.equal(a, b) for a, b in zip(usual, found, strict=True))
        assert is_read != (f"algorithm.{option}={str(value).lower()} (algorithm.adv_estimator={name})" in notice), (
            option
        )


OPTIONS = {
    f"{ACTOR}.clip_ratio": 0.05,
    f"{ACTOR}.clip_ratio_low": 0.05,
    f"{ACTOR}.clip_ratio_high": 0.05,
    f"{ACTOR}.clip_ratio_c": 1.1,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.5,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.5,
    f"{ACTOR}.policy_loss.clip_cov_ub": 1.6,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.5,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 1.0,
    f"{ACTOR}.policy_loss.tau_pos": 2.0,
    f"{ACTOR}.policy_loss.tau_neg": 2.0,
}


def loss_with(name: str, key: str | None = None) -> list[torch.Tensor]:
    """Return loss, gradient and metrics of tokens that are far from the old policy, on both sides."""
    option = key.rpartition(".")[2] if key else ""
    of_loss = {option: OPTIONS[key]} if key and "policy_loss" in key else {}
    of_actor = {option: OPTIONS[key]} if key and not of_loss else {}
    loss = PolicyLossConfig(loss_mode=name, **({"clip_cov_ratio": 0.05} | of_loss if name == "clip_cov" else of_loss))
    config = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **of_actor)
    old, step, advantages = draw(3, 40, WIDTH).unbind()
    leaf = (old - 3 + 0.5 * step).requires_grad_()
    torch.manual_seed(0)  # clip_cov draws
    found = get_policy_loss_fn(name)(
        old_log_prob=old - 3,
        log_prob=leaf,
        advantages=advantages,
        response_mask=torch.ones(40, WIDTH, dtype=torch.long),
        loss_agg_mode="token-mean",
        config=config,
    )
    found[0].backward()
    assert leaf.grad is not None
    return [leaf.grad, *(value.detach() for value in found)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_options_of_losses(base: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    usual = loss_with(name)
    notice = told(base, caplog, {f"{ACTOR}.policy_loss.loss_mode": name} | OPTIONS)
    for key, value in OPTIONS.items():
        is_read = any(not torch.equal(a, b) for a, b in zip(usual, loss_with(name, key), strict=True))
        assert is_read != (f"{key}={value} ({ACTOR}.policy_loss.loss_mode={name})" in notice), key


@pytest.mark.parametrize(
    "changes, other",
    [
        ({"algorithm.adv_estimator": "estimator_of_a_user"}, "algorithm.adv_estimator=estimator_of_a_user"),
        ({"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True}, "algorithm.use_pf_ppo=true"),
    ],
)
def test_what_needs_all_tokens_in_one_process_is_refused_by_name(
    base: Any, changes: dict[str, Any], other: str
) -> None:
    config = base.copy()
    for key, value in (changes | {"trainer.lazy_columns": True}).items():
        OmegaConf.update(config, key, value)
    with pytest.raises(ValueError, match=r"trainer.lazy_columns") as refused:
        validate_config(config, use_reference_policy=False, use_critic=False)
    assert other in str(refused.value)
    OmegaConf.update(config, "trainer.lazy_columns", False)
    try:
        validate_config(config, use_reference_policy=False, use_critic=False)
    except ValueError as error:
        assert "lazy_columns" not in str(error)
