"""Whole runs of ``main_ppo`` on one GPU: Ray, FSDP with NCCL, generation, checkpoints, replay."""

import pytest

from tests.special_e2e.conftest import assert_bit_for_bit

pytestmark = pytest.mark.timeout(1200)

ON_GPU = {
    "trainer.device": "cuda",
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.name": "hf",
}
BF16 = {
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "{param_dtype:bf16,reduce_dtype:fp32}",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
}
OFFLOAD = {
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
}


def test_a_run_is_stopped_and_replayed(workspace):
    """The second run ends after two steps and is resumed: numbers and digests are those of the first."""
    settings = ON_GPU | {"trainer.save_freq": 2}
    whole = workspace.train("gpu-whole", settings)
    workspace.train("gpu-resumed", settings | {"trainer.total_training_steps": 2})
    resumed = workspace.train("gpu-resumed", settings)
    assert_bit_for_bit(resumed, whole, (3, 4))
    for step in range(1, 5):
        assert abs(whole.steps[step]["training/rollout_probs_diff_max"]) < 1e-4  # fp32, two ways to compute
        assert whole.steps[step]["perf/max_memory_allocated_gb"] > 0


@pytest.mark.parametrize(
    "changes", [BF16, OFFLOAD | {"actor_rollout_ref.actor.strategy": "fsdp2"}], ids=["bf16", "offload"]
)
def test_shared_prefixes_and_a_critic(workspace, changes):
    ppo = {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": workspace.model,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "critic.model.use_remove_padding": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.model.use_prefix_sharing": True,
        "trainer.total_training_steps": 2,
    }
    run = workspace.train(f"gpu-ppo-{'-'.join(sorted(changes))[:40].replace('.', '_')}", ON_GPU | ppo | changes)
    assert run.steps[2]["actor/grad_norm"] > 0 and run.steps[2]["critic/grad_norm"] > 0
