"""Estimators and policy losses that no other run has train in ``main_ppo``: two steps on one worker."""

from typing import Any

import pytest

from .conftest import Workspace
from .features import ACTOR, GAP
from .test_features import FIRST_STEP
from .test_features import GAP as LARGEST_GAP

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

RUNS = {"grpo_passk": "gspo", "grpo_vectorized": "geo_mean"}
"""Loss by estimator."""


def train(workspace: Workspace, estimator: str, loss: str) -> Any:
    name = f"{estimator}-{loss}"
    return workspace.train(
        name,
        {
            "algorithm.adv_estimator": estimator,
            f"{ACTOR}.policy_loss.loss_mode": loss,
            "actor_rollout_ref.rollout.name": "hf",
            "trainer.total_training_steps": 2,
            "trainer.test_freq": -1,
            "trainer.rollout_data_dir": workspace.folder / name / "rollouts",
        },
    )


@pytest.mark.parametrize(("estimator", "loss"), RUNS.items())
def test_an_estimator_and_a_loss_train(workspace: Workspace, estimator: str, loss: str) -> None:
    """One update of each batch is on-policy: nothing is clipped, and the engine follows the weights."""
    run = train(workspace, estimator, loss)
    for numbers in (run.steps[1], run.steps[2]):
        assert numbers["actor/grad_norm"] > 0
        assert numbers["actor/pg_clipfrac"] == 0
        assert abs(numbers["actor/ppo_kl"]) < FIRST_STEP
        assert numbers[GAP] < LARGEST_GAP
        assert numbers["critic/advantages/max"] > numbers["critic/advantages/min"]
