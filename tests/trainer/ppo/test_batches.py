"""What the driver does with whole batches: rewards, advantages, validation metrics, kept rollouts, pools."""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.errors import PlacementError
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import resources
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.resources import ResourcePoolManager
from verl.trainer.ppo.state import RunState
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.validation import ValidationSamples, add_extras, summarise
from verl.workers.config import FSDPActorConfig


def scored(rewards, uids, mask=None):
    rewards = torch.tensor(rewards)
    mask = torch.ones_like(rewards) if mask is None else torch.tensor(mask)
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    return DataProto.from_dict(tensors, {"uid": np.array(uids, dtype=object)})


def test_kl_in_the_reward_by_hand():
    batch = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0], [-0.5, 7.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0], [-1.5, float("nan")]]),
        }
    )
    used = []
    controller = SimpleNamespace(value=0.1, update=lambda current_kl, n_steps: used.append((current_kl, n_steps)))
    batch, metrics = apply_kl_penalty(batch, controller)
    # k1 is (0.5, -1.0) and (1.0, masked): sequence means -0.25 and 1.0
    expected = torch.tensor([[0.0 - 0.05, 1.0 + 0.1], [2.0 - 0.1, 0.0]])
    assert torch.allclose(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.375)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert used == [(pytest.approx(0.375), 2)]


def test_group_advantages_by_hand():
    uids = ["a", "b", "a", "b"]
    rewards = [[0.0, 1.0], [0.0, 5.0], [0.0, 3.0], [0.0, 5.0]]
    batch = compute_advantage(scored(rewards, uids), "grpo", norm_adv_by_std_in_grpo=False)
    assert batch.batch["advantages"][:, 0].tolist() == [-1.0, 0.0, 1.0, 0.0]
    config = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    rloo = compute_advantage(scored(rewards, uids), "rloo", config=config)
    assert rloo.batch["advantages"][:, 0].tolist() == [-2.0, 0.0, 2.0, 0.0]
    baselines = scored(rewards, uids)
    baselines.batch["reward_baselines"] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    remax = compute_advantage(baselines, "remax", config=config)
    assert remax.batch["advantages"][:, 0].tolist() == [0.0, 4.0, 2.0, 4.0]


def test_gae_gets_values_and_discounts():
    batch = scored([[0.0, 1.0]], ["a"])
    batch.batch["values"] = torch.tensor([[0.5, 0.25]])
    batch = compute_advantage(batch, "gae", gamma=0.5, lam=0.5)
    # delta = (0 + 0.5 * 0.25 - 0.5, 1 - 0.25); A = (delta_0 + 0.25 * delta_1, delta_1); returns = A + V
    assert torch.allclose(batch.batch["returns"], torch.tensor([[-0.375 + 0.25 * 0.75 + 0.5, 1.0]]))


def test_discounts_of_a_recipe_that_passes_only_the_config():
    batch = scored([[0.0, 1.0]], ["a"])
    batch.batch["values"] = torch.tensor([[0.5, 0.25]])
    config = OmegaConf.create({"gamma": 0.5, "lam": 0.5})
    assert compute_advantage(batch, "gae", config=config).batch["returns"][0, 0].item() == pytest.approx(0.3125)
    assert compute_advantage(batch, "reinforce_plus_plus", config=config).batch["returns"].tolist() == [[0.5, 1.0]]
    assert compute_advantage(batch, "reinforce_plus_plus", gamma=0.1).batch["returns"][0, 0].item() == pytest.approx(
        0.1
    )
    assert compute_advantage(batch, "reinforce_plus_plus").batch["returns"].tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="adv_estimator=remax needs reward_baselines"):
        compute_advantage(batch, "remax", config=config)


def test_a_missing_response_mask_comes_from_the_attention_mask():
    batch = DataProto.from_dict(
        {"responses": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1, 0]])}
    )
    assert compute_response_mask(batch).tolist() == [[1, 0]]


# ---- validation


def test_metric_names_of_validation():
    samples = ValidationSamples(uids=["a", "a", "b", "b"], sources=["s"] * 4, scores=[1.0, 0.0, 1.0, 1.0])
    samples.extras["reward"] = samples.scores
    samples.extras["acc"] = [True, False, True, True]
    samples.extras["pred"] = ["4", "5", "4", "4"]
    samples.turns = [2, 4, 2, 2]
    metrics = summarise(samples)
    assert metrics["val-core/s/acc/mean@2"] == 0.75 and metrics["val-aux/s/reward/mean@2"] == 0.75
    assert {key for key in metrics if key.startswith("val-core/")} == {
        f"val-core/s/acc/{name}" for name in ("mean@2", "best@2/mean", "best@2/std", "maj@2/mean", "maj@2/std")
    }
    assert metrics["val-aux/s/acc/std@2"] == pytest.approx(0.25) and "val-aux/s/acc/worst@2/mean" in metrics
    assert (metrics["val-aux/num_turns/min"], metrics["val-aux/num_turns/max"]) == (2, 4)
    samples.extras["acc"] = [True]
    with pytest.raises(ValueError, match="'acc' is there for 1 of 4 validation samples"):
        summarise(samples)


def test_responses_that_cannot_be_scored_are_counted_in_validation():
    """Two prompts with one response each; the scorer fails on all of the first batch, so acc is unknown."""
    rows = [({"reward_failure": ["raised"]}, 0.0), ({"acc": [True], "pred": ["4"], "reward_failure": [None]}, 1.0)]
    for order in (rows, rows[::-1]):
        samples = ValidationSamples(uids=["a", "b"], sources=["s"] * 2)
        for extras, score in order:
            samples.scores.append(score)
            samples.extras["reward"].append(score)
            add_extras(samples.extras, dict(extras), len(samples.scores) - 1, 1)
        metrics = summarise(samples)
        assert metrics["val-core/s/acc/mean@1"] == metrics["val-aux/s/reward/mean@1"] == 0.5
        assert (metrics["val-aux/reward/failed"], metrics["val-aux/reward/failed_ratio"]) == (1, 0.5)
        assert not any("reward_failure" in name for name in metrics)


# ---- balancing


def sharing(is_on, shuffles=False, **changes):
    """What balancing reads of a run that shares prefixes or not, with mini-batches of two prompts with two samples."""
    actor = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=2, shuffle=shuffles, **changes)
    model, rollout = SimpleNamespace(use_prefix_sharing=is_on, use_remove_padding=True), SimpleNamespace(n=2)
    policy = SimpleNamespace(actor=actor, model=model, rollout=rollout)
    return SimpleNamespace(actor_rollout_ref=policy, critic=None)


@pytest.mark.parametrize("shuffles", [False, True])
def test_samples_of_a_prompt_go_to_one_worker(shuffles):
    """Within each mini-batch, unless rows are shuffled: then others would meet in a mini-batch."""
    attended = torch.ones(8, 6, dtype=torch.long)
    attended[:, 0] = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1])
    uids = list("aabbccdd")
    columns = {"attention_mask": attended, "responses": torch.zeros(8, 3), "row": torch.arange(8)}
    orders = []
    for is_on in (False, True):
        batch = DataProto.from_dict(deepcopy(columns), non_tensors={"uid": np.array(uids, dtype=object)})
        trainer = RayPPOTrainer.__new__(RayPPOTrainer)
        trainer.state = RunState(seed=1)
        trainer.actor_rollout_wg = SimpleNamespace(world_size=2)
        trainer.run_config = sharing(is_on, shuffles)
        trainer._balance_batch(batch, {})
        orders.append(batch.batch["row"].tolist())
        assert batch.batch["row"][trainer.state.row_order].tolist() == list(range(8))
    plain, grouped = orders
    assert (plain == grouped) == shuffles
    for first in (0, 2):  # two rows of each of two workers
        before, after = ([order[at : at + 2] for at in (first, first + 4)] for order in orders)
        assert sorted(before[0] + before[1]) == sorted(after[0] + after[1])
        pairs = [each for each in range(0, 8, 2) if {each, each + 1} <= {*after[0], *after[1]}]
        assert shuffles or all(any({each, each + 1} == set(part) for part in after) for each in pairs)


@pytest.mark.parametrize("workers, samples", [(8, 2), (4, 2), (2, 2), (8, 4)])
def test_mini_batches_keep_their_members_where_workers_share_rows(workers, samples):
    """Two workers share each shard; twelve rows do not divide over eight workers, which make four shards."""
    shards, rows = workers // 2, 6 * samples
    generator = torch.Generator().manual_seed(workers)
    attended = (torch.arange(9) < torch.randint(4, 9, (rows, 1), generator=generator)).long()
    uids = np.array([f"prompt {row // samples}" for row in range(rows)], dtype=object)
    batches = []
    for is_on in (False, True):
        columns = {"attention_mask": attended, "responses": torch.zeros(rows, 3), "row": torch.arange(rows)}
        batch = DataProto.from_dict(deepcopy(columns), non_tensors={"uid": uids})
        trainer = RayPPOTrainer.__new__(RayPPOTrainer)
        trainer.state, trainer.actor_rollout_wg = RunState(seed=1), SimpleNamespace(world_size=workers)
        trainer.run_config = sharing(is_on, ulysses_sequence_parallel_size=2)
        trainer.run_config.actor_rollout_ref.rollout.n = samples
        trainer._balance_batch(batch, {})
        own = batch.batch["row"].view(shards, 3, -1)  # by shard and mini-batch
        batches.append([sorted(own[:, at].flatten().tolist()) for at in range(3)])
    assert batches[0] == batches[1]


def test_balanced_rows_can_be_put_back():
    lengths = [1, 6, 2, 5, 3, 4]
    mask = (torch.arange(6)[None] < torch.tensor(lengths)[:, None]).long()
    batch = DataProto.from_dict({"attention_mask": mask, "row": torch.arange(6)})
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.state = RunState(seed=1)
    trainer.actor_rollout_wg = SimpleNamespace(world_size=2)
    trainer.run_config = sharing(False)
    metrics = {}
    trainer._balance_batch(batch, metrics)
    tokens = batch.batch["attention_mask"].sum(-1)
    assert sorted((tokens[:3].sum().item(), tokens[3:].sum().item())) == [10, 11]
    assert batch.batch["row"][trainer.state.row_order].tolist() == list(range(6))
    assert (metrics["global_seqlen/min"], metrics["global_seqlen/max"]) == (9, 12)  # 1+6+2 and 5+3+4 as they came
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (10, 11)
    # four workers of which two share each shard of the batch
    trainer.actor_rollout_wg.world_size = 4
    trainer._balance_batch(batch, metrics)
    tokens = batch.batch["attention_mask"].sum(-1)
    assert sorted((tokens[:3].sum().item(), tokens[3:].sum().item())) == [10, 11]


# ---- pools


@pytest.mark.parametrize(
    "device, spec, nodes, text",
    [
        ("cuda", {"global_pool": [8, 8]}, [{"GPU": 8.0}], r"16 in all, and the cluster has 8 \(missing 8\)"),
        ("cuda", {"global_pool": [2]}, [{"CPU": 4.0}], "write trainer.device=cpu"),
        ("cuda", {"global_pool": [8]}, [{"GPU": 4.0}, {"GPU": 4.0}], "8 on one node, and the largest node has 4"),
        ("cpu", {"global_pool": [2], "reward_pool": [1]}, [{"CPU": 2.0}], "3 in all, and the cluster has 2"),
    ],
)
def test_pools_that_cannot_be_placed_are_refused_with_what_is_missing(monkeypatch, device, spec, nodes, text):
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    dead = [{"Alive": False, "Resources": {"GPU": 64.0, "CPU": 64.0}}]
    monkeypatch.setattr(resources.ray, "nodes", lambda: alive + dead)
    manager = ResourcePoolManager(spec, mapping={}, device_name=device)
    with pytest.raises(PlacementError, match=text):
        manager.create_resource_pool()


def test_pools_count_worker_processes(monkeypatch):
    monkeypatch.setattr(resources.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    manager = ResourcePoolManager({"global_pool": [2]}, mapping={}, device_name="cpu")
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 2
    assert manager.resource_pool_dict["global_pool"].world_size == 2


PF_PPO = {"use_pf_ppo": True, "pf_ppo": {"reweight_method": "pow", "weight_pow": 1.0}}
SHORT_PF_PPO = ({"use_pf_ppo": True}, {"use_pf_ppo": True, "pf_ppo": None})


@pytest.mark.parametrize("config", [PF_PPO, *SHORT_PF_PPO, *map(OmegaConf.create, (PF_PPO, *SHORT_PF_PPO))])
def test_pf_ppo_draws_by_its_generator_alone(config):
    def drawn(seed):
        torch.rand(seed)  # others draw from the process's generator
        batch = scored([[float(row)] for row in range(1, 9)], list("abcdefgh"))
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"]
        batch.batch["values"] = torch.zeros(8, 1)
        batch = compute_advantage(batch, "gae", config=config, generator=torch.Generator().manual_seed(seed))
        return list(batch.non_tensor_batch["uid"])

    first = drawn(1)
    assert drawn(1) == first and drawn(2) != first


def test_pools_without_a_device_follow_the_run_and_a_critic_is_started_if_one_is_trained(monkeypatch):
    monkeypatch.setattr(resources.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    started = []

    def group(resource_pool, ray_cls_with_init, device_name, **options):
        assert not resource_pool.use_gpu and device_name == "cpu"
        return SimpleNamespace(spawn=lambda prefix_set: {name: started.append(name) for name in prefix_set})

    monkeypatch.setattr(resources, "create_colocated_worker_cls", lambda class_dict: class_dict)
    monkeypatch.setattr(resources, "RayClassWithInitArgs", lambda **arguments: arguments)
    mapping = dict.fromkeys((Role.ActorRollout, Role.Critic), "global_pool")
    for estimator, expected in (("grpo", ["actor_rollout"]), ("gae", ["actor_rollout", "critic"])):
        config = OmegaConf.create({"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {}, "critic": {}})
        config.critic = {"_target_": "verl.workers.config.FSDPCriticConfig", "ppo_micro_batch_size_per_gpu": 1}
        pools = ResourcePoolManager({"global_pool": [2]}, mapping)
        resources.create_worker_groups(config, RunConfig.parse(config), dict.fromkeys(mapping), pools, group, "cpu")
        assert pools.device_name == "cpu" and started == expected
        started.clear()


def test_log_probs_of_the_rollout_are_the_old_ones_and_no_pass_computes_others():
    trainer = object.__new__(RayPPOTrainer)
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"use_rollout_log_probs": True}}})
    actor = SimpleNamespace(use_rollout_log_probs=True, uses_full_kl=False)
    trainer.run_config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor))
    trainer.use_reference_policy = trainer.use_critic = False
    trainer.config = config
    rollout = torch.tensor([[-1.0, -2.0]])
    batch = DataProto.from_dict({"rollout_log_probs": rollout, "response_mask": torch.ones(1, 2)})
    batch = trainer.infer(batch, {}, {})  # it has no workers
    assert torch.equal(batch.batch["old_log_probs"], rollout)
    with pytest.raises(ValueError, match="the rollout returned no rollout_log_probs"):
        trainer.infer(batch.select(["response_mask"]), {}, {})
