"""A run on a rollout engine from outside the package."""

from .conftest import Workspace

ENGINE = "examples.rollout_engine.min_p.MinPRollout"


def test_a_run_trains_on_an_engine_from_outside(workspace: Workspace) -> None:
    """The trainer computes the log-probabilities that the engine reports, also with the weights of the first update."""
    overrides = {"actor_rollout_ref.rollout.name": ENGINE, "trainer.total_training_steps": 2}
    run = workspace.train(
        "outside", overrides | {"data.max_response_length": 8, "actor_rollout_ref.rollout.temperature": 1.0}
    )
    assert set(run.steps) >= {1, 2}
    for step in (1, 2):
        assert run.steps[step]["training/rollout_probs_diff_max"] < 1e-4
        assert run.steps[step]["actor/grad_norm"] > 0
