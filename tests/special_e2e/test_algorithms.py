"""Estimators and policy losses that no other run has train in ``main_ppo``: two steps on one worker.

One update of each batch is on-policy, so that what a step reports of its advantages and its loss follows from the
scores that it dumps: here by the definitions, without the code of the library.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from . import features
from .conftest import Run, Workspace
from .features import ACTOR, GAP
from .test_features import FIRST_STEP
from .test_features import GAP as LARGEST_GAP
from .verification import record

pytestmark = pytest.mark.full

RESPONSE_LENGTH, RESPONSES = 16, 32
DR_GRPO = {
    "algorithm.norm_adv_by_std_in_grpo": False,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reinforce_plus_plus, cispo": ("reinforce_plus_plus", "cispo", {}),
    "reinforce_plus_plus_baseline, sapo": ("reinforce_plus_plus_baseline", "sapo", {}),
    "gpg, gpg": ("gpg", "gpg", {}),
    "opo, vanilla": ("opo", "vanilla", {}),
    "rloo, vanilla": ("rloo", "vanilla", {}),
    "rloo_vectorized, vanilla": ("rloo_vectorized", "vanilla", {}),
    "Dr. GRPO, vanilla": ("grpo", "vanilla", DR_GRPO),
    "grpo_passk, gspo": ("grpo_passk", "gspo", {}),
    "grpo_vectorized, geo_mean": ("grpo_vectorized", "geo_mean", {}),
}
"""Estimator, loss and what else differs, by name."""


def common(workspace: Workspace, name: str) -> dict[str, Any]:
    return {
        "actor_rollout_ref.rollout.name": "hf",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": -1,
        "trainer.rollout_data_dir": workspace.folder / name / "rollouts",
    }


@pytest.fixture(scope="module")
def runs(workspace: Workspace) -> Any:
    """Return a run by its name; each is made once."""
    made: dict[str, Run] = {}

    def get(label: str) -> Run:
        if label not in made:
            estimator, loss, changes = RUNS[label]
            name = label.replace(", ", "-").replace(" ", "").replace(".", "")
            chosen = {"algorithm.adv_estimator": estimator, f"{ACTOR}.policy_loss.loss_mode": loss, **changes}
            made[label] = workspace.train(name, common(workspace, name) | chosen)
        return made[label]

    return get


def groups_of(run: Run, step: int) -> list[np.ndarray]:
    """Return the scores of each prompt's responses."""
    groups = defaultdict(list)
    for prompt, _, score in features.responses(run, step):
        groups[prompt].append(score)
    found = [np.array(scores) for scores in groups.values()]
    assert [len(scores) for scores in found] == [4] * 8
    return found


def advantages_of(label: str, groups: list[np.ndarray]) -> np.ndarray | None:
    """Return the advantage of each response by the definition; None where tokens matter."""
    if label.startswith("grpo_passk"):
        rows = []
        for scores in groups:
            second, first = np.sort(scores)[-2:]
            best = np.arange(4) == scores.argmax()
            rows.append(best * (first - second) / (scores.std(ddof=1) + 1e-6))
        return np.concatenate(rows)
    if label.startswith("grpo"):
        return np.concatenate([(scores - scores.mean()) / (scores.std(ddof=1) + 1e-6) for scores in groups])
    if label.startswith("gpg"):
        scale = RESPONSES / sum(np.count_nonzero(scores) for scores in groups)
        return np.concatenate([scale * (scores - scores.mean()) for scores in groups])
    if label.startswith("rloo"):
        return np.concatenate([scores - (scores.sum() - scores) / 3 for scores in groups])
    if label.startswith("Dr. GRPO"):
        return np.concatenate([scores - scores.mean() for scores in groups])
    return None


def loss_of(label: str, numbers: dict[str, float], advantages: np.ndarray | None) -> float | None:
    """Return the loss where every ratio is 1; None where it depends on the log-probabilities too."""
    if label.endswith(("gspo", "geo_mean")):
        assert advantages is not None
        return float(-advantages.mean())
    if label == "Dr. GRPO, vanilla":
        return -numbers["critic/advantages/mean"] * numbers["response_length/mean"] / RESPONSE_LENGTH
    return -numbers["critic/advantages/mean"] if label.endswith("vanilla") else None


@pytest.mark.parametrize("label", RUNS)
def test_an_estimator_and_a_loss_train(runs: Any, verification_page: Any, label: str) -> None:
    run = runs(label)
    furthest = 0.0
    for step in (1, 2):
        numbers = run.steps[step]
        assert numbers["actor/grad_norm"] > 0
        assert numbers["actor/pg_clipfrac"] == 0
        assert abs(numbers["actor/ppo_kl"]) < FIRST_STEP
        assert numbers[GAP] < LARGEST_GAP
        assert numbers["response_length/min"] >= 1
        lowest, mean, highest = (numbers[f"critic/advantages/{name}"] for name in ("min", "mean", "max"))
        assert highest > lowest
        advantages = advantages_of(label, groups_of(run, step))
        if advantages is None:  # whitened over tokens, or set off against a mean by length: they cancel in the batch
            differences = [abs(mean)]
        else:
            differences = [abs(highest - advantages.max()), abs(lowest - advantages.min())]
        loss = loss_of(label, numbers, advantages)
        if loss is not None:
            differences.append(abs(numbers["actor/pg_loss"] - loss))
        furthest = max(furthest, *differences)
    kl = max(abs(run.steps[step]["actor/ppo_kl"]) for step in (1, 2))
    record(verification_page, "## Algorithms", [label, f"{furthest:.1e}", f"{kl:.1e}", f"{features.gap_of(run):.1e}"])
    assert furthest < FIRST_STEP


def test_the_names_of_rloo_are_one_estimator(runs: Any) -> None:
    one, other = runs("rloo, vanilla"), runs("rloo_vectorized, vanilla")
    for step in (1, 2):
        assert features.responses(other, step) == features.responses(one, step)
        assert features.compared(other, step) == features.compared(one, step)


def test_pf_ppo_trains_on_the_best_and_the_worst(workspace: Workspace, verification_page: Any) -> None:
    """The rows of a step are drawn from those that the same run without it trains on."""

    def train(name: str, changes: dict[str, Any]) -> Run:
        return workspace.train(name, features.base(workspace, name) | common(workspace, name) | changes)

    plain = train("gae", {})
    drawn = train("pf-ppo", {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"})
    sampled, kept = features.responses(plain, 1), features.responses(drawn, 1)
    scores = [score for _, _, score in sampled]
    extreme = {row for row in sampled if row[2] in (min(scores), max(scores))}
    assert len(kept) == RESPONSES and set(kept) <= extreme and {row[2] for row in kept} == {min(scores), max(scores)}
    assert any(min(scores) < score < max(scores) for score in scores)
    assert features.responses(plain, 2) != features.responses(drawn, 2)
    for step in (1, 2):
        numbers = drawn.steps[step]
        assert numbers["actor/grad_norm"] > 0 and numbers["critic/grad_norm"] > 0
        assert numbers[GAP] < LARGEST_GAP
    assert drawn.steps[1]["critic/score/max"] == pytest.approx(max(scores))
    record(verification_page, "## Algorithms", ["gae with PF-PPO, vanilla", "", "", f"{features.gap_of(drawn):.1e}"])
