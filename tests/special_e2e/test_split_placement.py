"""Split placement trains on CPU: actor and critic in processes of their own, which update at the same time."""

import pytest

PPO = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.n": 1,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.optim.lr": 1e-3,
    "critic.model.use_remove_padding": True,
    "critic.model.enable_gradient_checkpointing": False,
    "trainer.critic_warmup": 2,
    "trainer.test_freq": -1,
}
NUMBERS = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")


@pytest.mark.full
def test_the_halves_train_like_shared_devices(workspace):
    """The numbers are those of one worker that has all roles: only the placement differs."""
    ppo = PPO | {"critic.model.path": workspace.model}
    shared = workspace.train("shared", ppo, timeout_s=900)
    halves = {"trainer.n_gpus_per_node": 2, "trainer.save_freq": 2}
    split = workspace.train("split", ppo | halves, module="examples.split_placement.main_ppo_split", timeout_s=900)
    assert set(split.steps) == set(shared.steps) == {1, 2, 3, 4}
    for step, numbers in split.steps.items():
        same = shared.steps[step]
        assert ("actor/pg_loss" in numbers) == (step > 2)  # the critic alone is trained before
        names = [name for name in NUMBERS if name in same]
        assert {n: numbers[n] for n in names} == pytest.approx({n: same[n] for n in names}, rel=1e-4, abs=1e-6)
        assert numbers["timing_s/update_critic"] > 0
    assert {file.name for file in (split.folder / "global_step_4").iterdir()} >= {"actor", "critic"}
