"""Whole runs whose agents are programs of their own: a client of the ``openai`` package trains through the endpoint."""

import pytest
import yaml

from verl.utils.observe.record import read_entries


@pytest.mark.full
def test_an_openai_client_trains(workspace, tmp_path):
    """The trainer computes the log-probabilities that the engine sampled with, over both turns; a rerun is equal."""
    loops = tmp_path / "loops.yaml"
    agents = "tests.special_e2e.endpoint_agents.AskTwice"
    loops.write_text(
        yaml.dump(
            [
                {"name": "own", "_target_": agents},
                {"name": "judged", "_target_": agents, "scores": False},
                {"name": "forgets", "_target_": agents, "forgets": True},
            ]
        )
    )
    changes = {
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": loops,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "own",
        "data.max_response_length": 48,
        "trainer.total_training_steps": 2,
        "trainer.record_digests": True,
        "trainer.test_freq": 2,
    }
    runs = [workspace.train(f"endpoint-{number}", changes) for number in range(2)]
    for step in (1, 2):
        numbers = runs[0].numbers(step)
        assert numbers["segments/max"] == 1 and numbers["num_turns/mean"] == 4
        assert numbers["critic/score/max"] > 0 and numbers["actor/grad_norm"] > 0
        assert numbers["training/rollout_probs_diff_max"] < 1e-4  # fp32, two layers
        assert numbers == runs[1].numbers(step)
    digests = [[entry["phases"] for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in runs]
    assert digests[0] == digests[1]
    judged = workspace.train(
        "endpoint-judged", changes | {"actor_rollout_ref.rollout.agent.default_agent_loop": "judged"}
    )
    assert judged.steps[2]["critic/score/mean"] > 0
    forgets = workspace.train(
        "endpoint-forgets", changes | {"actor_rollout_ref.rollout.agent.default_agent_loop": "forgets"}
    )
    for step in (1, 2):  # both answers of each of the 32 samples are trained
        numbers = forgets.numbers(step)
        assert numbers["segments/min"] == 2 and numbers["segments/rows"] == 64 and numbers["num_turns/mean"] == 3
        assert numbers["training/rollout_probs_diff_max"] < 1e-4 and numbers["actor/grad_norm"] > 0
        assert numbers["critic/score/max"] > 0
