"""The metrics of the covariance, and the scorer of the recipe."""

import math

import pytest
import torch

from recipe.entropy.entropy_ray_trainer import covariance_metrics
from recipe.entropy.reward_score import compute_score
from verl.utils.reward_score import default_compute_score

NAN = math.nan


def test_by_hand() -> None:
    """Advantages 2, -1, 0.5, -1.5 (mean 0) and log-probabilities 1, -3, -2, -4 (mean -2): 6, 1, 0 and 3."""
    log_prob = torch.tensor([[1.0, -3.0, NAN], [-2.0, NAN, -4.0]])
    advantages = torch.tensor([[2.0, -1.0, NAN], [0.5, NAN, -1.5]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert covariance_metrics(log_prob, advantages, mask, (0.5, 5.0)) == {
        "actor/covariance/mean": 2.5,
        "actor/covariance/max": 6.0,
        "actor/covariance/share_in_bounds": 0.5,
    }
    assert covariance_metrics(log_prob, advantages, mask, (None, None))["actor/covariance/share_in_bounds"] == 0.25
    assert covariance_metrics(log_prob, advantages, mask * 0, (None, None)) == {}


def test_a_constant_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob, advantages = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).unbind()
    mask = torch.ones(5, 7)
    first = covariance_metrics(log_prob, advantages, mask, (0.0, 1.0))
    assert covariance_metrics(log_prob + 3, advantages - 7, mask, (0.0, 1.0)) == pytest.approx(first)
    pairs = torch.stack([log_prob.flatten(), advantages.flatten()])
    assert first["actor/covariance/mean"] == pytest.approx(torch.cov(pairs, correction=0)[0, 1].item())


@pytest.mark.parametrize(
    ("source", "answer", "truth", "score"),
    [
        ("math_dapo", r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math_dapo", r"so it is \boxed{3}", "0.5", 0.0),
        ("aime_2025", "The answer is 34.", "34", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{(1, 2)}", "(1,2)", 1.0),
        ("numina_olympiads", "34", "34", 0.0),  # not stated as an answer
    ],
)
def test_mathematics_is_compared_by_algebra(source: str, answer: str, truth: str, score: float) -> None:
    scored = compute_score(source, answer, truth)
    assert scored["score"] == score and scored["acc"] == bool(score)


def test_other_sources_have_the_scorers_of_verl() -> None:
    for answer in ("#### 12", "#### 13"):
        assert compute_score("openai/gsm8k", answer, "12") == default_compute_score("openai/gsm8k", answer, "12")
