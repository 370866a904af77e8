"""Whole runs with ``trainer.lazy_columns`` equal plain ones: digests and weights bit for bit, metrics to rounding."""

import pytest

from verl.utils.observe.record import read_entries

from .test_async_rollout import ASYNC, TENSOR_PARALLEL, TWO, phases_of, short_turns
from .test_reward_models import scored_by, write_reward_model
from .test_train import PPO, TWO_WORKERS

LAZY = {"trainer.lazy_columns": True}
SHORT = {"trainer.total_training_steps": 2, "trainer.test_freq": 2, "trainer.record_samples": 2}
REFERENCE = {
    "algorithm.use_kl_in_reward": True,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "algorithm.rollout_is_threshold": 2.0,
    "algorithm.rollout_is_level": "sequence",
    "algorithm.rollout_is": True,
}


def only_of_lazy(numbers: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if name.startswith("driver/")}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TENSOR_PARALLEL, id="grpo"),
        pytest.param(TWO | ASYNC, id="grpo async"),
        pytest.param(TWO | REFERENCE | {"algorithm.adv_estimator": "opo"}, id="opo with reference"),
        pytest.param(TWO_WORKERS | PPO, id="ppo"),
        pytest.param(TWO | ASYNC | REFERENCE | {"algorithm.adv_estimator": "reinforce_plus_plus"}, id="whitened async"),
        pytest.param(TWO | {"algorithm.adv_estimator": "remax"}, id="remax"),
        pytest.param(TWO | {"reward_model.enable": True}, id="reward model"),
    ],
)
def test_a_run_with_columns_by_reference_equals_the_plain_run(workspace, request, case):
    name = request.node.callspec.id.replace(" ", "-")
    if "critic.optim.lr" in case:
        case = case | {"critic.model.path": workspace.model}
    if "reward_model.enable" in case:
        case = case | scored_by(write_reward_model(workspace), workspace)
    plain = workspace.train(f"plain-{name}", SHORT | case)
    lazy = workspace.train(f"lazy-{name}", SHORT | case | LAZY)
    for step in plain.steps:
        found, expected = lazy.numbers(step), plain.numbers(step)
        extra = only_of_lazy(found)
        assert found.keys() - extra.keys() == expected.keys()
        for metric, value in expected.items():
            # Sums over fp32 tokens are taken in another order; advantages of about 1 have means of rounding only.
            assert found[metric] == pytest.approx(value, rel=2e-5, abs=2e-6), (step, metric)
        # The driver has read the prompts and responses of two samples, and no other row.
        assert 0 < extra["driver/column_bytes"] <= 2 * (2 * 48 + 3 * 16 + 2 * 16) * 8
    entries = [read_entries(run.folder / "metrics.jsonl") for run in (plain, lazy)]
    for step in plain.steps:
        assert entries[0][step]["phases"] == entries[1][step]["phases"], f"digests of step {step}"
        assert entries[0][step]["samples"] == entries[1][step]["samples"]
        assert entries[0][step]["response_length"] == entries[1][step]["response_length"]


@pytest.mark.full
def test_segments_of_shared_prompts_are_on_the_ranks_of_the_plain_run(workspace, tmp_path):
    """Trajectories of several segments are trained as in the plain run, bit for bit."""
    sharing = {"actor_rollout_ref.model.use_prefix_sharing": True, "trainer.balance_batch": True}
    changes = short_turns(tmp_path) | TWO | sharing
    plain, lazy = (workspace.train(f"turns-{len(more)}", changes | more) for more in ({}, LAZY))
    for step in plain.steps:
        found = lazy.numbers(step)
        extra = only_of_lazy(found)
        assert {name: value for name, value in found.items() if name not in extra} == plain.numbers(step)
    digests = [
        [phases_of(entry) for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in (plain, lazy)
    ]
    assert digests[0] == digests[1]
