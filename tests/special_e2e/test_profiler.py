"""Profiles of a real run: exactly the steps, roles and ranks that were asked for."""

import json
from collections import defaultdict

import pytest

from tests import chrome_trace, metrics_page

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
MARKS = {
    "actor": {"actor_compute_log_prob", "actor_update", "mini_batch 0", "mini_batch 1"},
    "rollout": {"rollout_generate"},
    "ref": {"ref_compute_log_prob"},
    "critic": {"critic_compute_values", "critic_update", "mini_batch 0", "mini_batch 1"},
}


@pytest.mark.full
def test_traces_of_the_steps_roles_and_ranks_that_were_asked_for(workspace):
    """Three steps with four roles on two workers; the rollout follows the actor, whose rank 1 is profiled."""
    folder = workspace.folder / "profiler" / "traces"
    run = workspace.train(
        "profiler",
        {
            "algorithm.adv_estimator": "gae",
            "algorithm.use_kl_in_reward": True,
            f"{CRITIC}.model.path": workspace.model,
            f"{CRITIC}.model.enable_gradient_checkpointing": False,
            f"{CRITIC}.ppo_micro_batch_size_per_gpu": 4,
            f"{ACTOR}.ppo_mini_batch_size": 4,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
            "trainer.n_gpus_per_node": 2,
            "trainer.total_training_steps": 3,
            "trainer.test_freq": -1,
            "global_profiler.tool": "torch",
            "global_profiler.steps": "[1,3]",
            "global_profiler.save_path": folder,
            "global_profiler.relocate_results": True,
            "global_profiler.finish_hook_cmd": "'ls >listing_$VERL_PROFILE_RANK'",
            "global_profiler.finish_hook_ranks": "[1]",
            f"{ACTOR}.profiler.enable": True,
            f"{ACTOR}.profiler.ranks": "[1]",
            "actor_rollout_ref.ref.profiler.enable": True,
            f"{CRITIC}.profiler.enable": True,
            f"{CRITIC}.profiler.all_ranks": True,
        },
    )
    ranks = {"actor": [1], "rollout": [1], "ref": [0], "critic": [0, 1]}
    wanted = {
        f"step{step}/{role}/prof_start_0_end_last_rank_{rank}.json"
        for step in (1, 3)
        for role in ranks
        for rank in ranks[role]
    }
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert found.pop("listing_1").read_text().split() == ["listing_1", "step1", "step3"]
    assert found.keys() == wanted
    for name, path in found.items():
        trace = json.loads(path.read_text())
        assert chrome_trace.faults(trace) == []
        events = trace["traceEvents"]
        marked = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        role = name.split("/")[1]
        assert MARKS[role] <= marked
        for other in MARKS.keys() - {role}:
            assert not MARKS[other] & marked - MARKS[role], f"{name} holds ranges of {other}"
        kinds = defaultdict(int)
        for event in events:
            kinds[event.get("cat")] += 1
        assert kinds["cpu_op"] > 100
    assert all("timing_s/start_profile" in run.steps[step] for step in (1, 3))
    assert "timing_s/start_profile" not in run.steps[2]
    for numbers in run.steps.values():
        assert metrics_page.unknown(set(numbers)) == set()
        for phase in ("actor", "actor_infer", "critic", "critic_infer", "ref", "rollout"):
            assert 0 < numbers[f"perf/mfu/{phase}"] < 1
            assert numbers[f"perf/memory/{phase}/max_rss_gb"] > 0.1
