"""Rows whose trajectories failed: spare prompts in their place, and rows that fill a batch outside all numbers."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.algos.advantage import compute_pf_ppo_reweight_data
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import NothingScoredError, compute_reward, leave_unscored_out, refuse_nothing_scored
from verl.trainer.ppo.shaping import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.spares import FIRST_SEED, SparePrompts
from verl.trainer.ppo.state import RunState
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.numerics.seeding import sampling_seeds
from verl.workers.rewards.scoring import Reason, ScoringLimits

SAMPLES, WIDTH, SEED, STEP = 2, 4, 1, 3


class Prompts(torch.utils.data.Dataset):
    """Prompt i is the token 10 + i, and its truth is i."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.tensor([0, 10 + index])
        mask = torch.tensor([0, 1])
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.zeros(2, dtype=torch.int64),
            "reward_model": {"ground_truth": str(index)},
            "index": index,
        }


class Rollout:
    """Says the token of the prompt; names the first ``fails`` prompts of each call as failed, as long as it has any."""

    world_size = 1

    def __init__(self, *fails: int) -> None:
        self.fails = list(fails)
        self.asked: list[DataProto] = []

    def generate_sequences(self, requests: DataProto) -> DataProto:
        self.asked.append(requests)
        prompts, count = requests.batch["input_ids"], len(requests)
        mask = torch.ones(count, WIDTH, dtype=torch.int64)
        responses = prompts[:, -1:].expand(count, WIDTH).clone()
        uids = requests.non_tensor_batch["uid"]
        failing = list(dict.fromkeys(uids))[: self.fails.pop(0) if self.fails else 0]
        empty = torch.from_numpy(np.isin(uids.astype(str), failing)) & (torch.arange(count) % SAMPLES == 1)
        mask[empty] = 0
        responses[empty] = 0
        attention = torch.cat([requests.batch["attention_mask"], mask], dim=-1)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=-1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
        }
        columns = {"uid": uids} | ({"__dropped__": empty.numpy()} if failing else {"seen": np.full(count, 1)})
        meta: dict[str, Any] = {"eos_token_id": [9], "pad_token_id": 0, "timing": {"generate_sequences": 1.0}}
        meta["metrics"] = {"attempts/started": float(count), "attempts/replaced": float(len(failing) * SAMPLES)}
        return DataProto.from_dict(tensors, columns, meta_info=meta | ({"replace": failing} if failing else {}))


def make_trainer(*fails: int, spares_drawn: int = 0) -> RayPPOTrainer:
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    tree: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo"}, "trainer": {"balance_batch": False}}
    trainer.config = OmegaConf.create(tree | {"actor_rollout_ref": {"rollout": {"n": SAMPLES}}})
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.actor_rollout_wg = Rollout(*fails)
    trainer.use_rm = False
    trainer.state = RunState(seed=SEED, step=STEP, spares_drawn=spares_drawn)
    trainer.train_dataset = Prompts()
    trainer.train_dataloader = type("Loader", (), {"collate_fn": staticmethod(collate_fn)})()
    return trainer


def generated(trainer: RayPPOTrainer) -> tuple[DataProto, dict[str, float]]:
    metrics: dict[str, float] = {}
    batch = trainer.prepare(collate_fn([Prompts()[index] for index in range(3)]))
    return trainer.generate(batch, metrics, {}), metrics


def test_spare_prompts_stand_where_others_failed() -> None:
    """Prompts 0 and 1 fail, and then the first spare one too: three spare prompts in the two places."""
    trainer = make_trainer(2, 1)
    batch, metrics = generated(trainer)
    spare = SparePrompts(Prompts(), collate_fn, RunState(seed=SEED, step=STEP)).draw(3)
    drawn = spare.non_tensor_batch["index"].tolist()
    expected = [drawn[2], drawn[1], 2]
    truths = [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]]
    assert truths == [str(index) for index in expected for _ in range(SAMPLES)]
    assert batch.batch["responses"][:, 0].tolist() == [10 + index for index in expected for _ in range(SAMPLES)]
    assert batch.batch["response_mask"].all() and not batch.non_tensor_batch["__dropped__"].any()
    uids = batch.non_tensor_batch["uid"].tolist()
    assert uids[:4:2] == [spare.non_tensor_batch["uid"][2], spare.non_tensor_batch["uid"][1]] and len(set(uids)) == 3
    seeds = batch.batch["sampling_seed"]
    assert torch.equal(seeds[:2], sampling_seeds(SEED, STEP, 1, SAMPLES, first_prompt=FIRST_SEED + 2))
    assert torch.equal(seeds[4:], sampling_seeds(SEED, STEP, 1, SAMPLES, first_prompt=2))
    assert trainer.state.spares_drawn == 3
    assert metrics["attempts/started"] == 6 + 4 + 2 and metrics["attempts/replaced"] == 4 + 2
    assert "replace" not in batch.meta_info


def test_the_position_of_the_spare_prompts_is_a_number_that_a_checkpoint_keeps() -> None:
    state = RunState(seed=SEED, step=STEP)
    spares = SparePrompts(Prompts(), collate_fn, state)
    whole = [spares.draw(1).non_tensor_batch["index"][0] for _ in range(15)]
    assert all(sorted(whole[at : at + 5]) == [0, 1, 2, 3, 4] for at in (0, 5, 10)) and whole[:5] != whole[5:10]
    resumed = SparePrompts(Prompts(), collate_fn, RunState(seed=SEED, step=STEP, spares_drawn=7))
    assert resumed.draw(6).non_tensor_batch["index"].tolist() == whole[7:13]


def test_prompts_that_fail_for_ever_end_the_run() -> None:
    generated(make_trainer(*[1] * 10))  # the tenth spare prompt does it
    with pytest.raises(RuntimeError, match=r"step 3: 1 prompts were replaced 10 times.*attempts\.jsonl"):
        generated(make_trainer(*[1] * 12))


def filled_batch() -> DataProto:
    """Two prompts of two samples; the second sample of each has no trajectory, and of the third prompt none has."""
    mask = torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1], [0, 0], [0, 0]])
    scores = torch.tensor([[0.0, 1.0], [0, 0], [3.0, 0], [0, 1.0], [0, 0], [0, 0]])
    tensors = {
        "responses": torch.full((6, 2), 7) * mask,
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(6, 1, dtype=torch.int64), mask], dim=-1),
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "old_log_probs": torch.zeros(6, 2),
        "ref_log_prob": torch.full((6, 2), -1.0) * mask,
    }
    columns = {
        "uid": np.array(["a", "a", "b", "b", "c", "c"], dtype=object),
        "__dropped__": np.array([False, True, False, False, True, True]),
        "__num_turns__": np.array([2, 0, 4, 6, 0, 0]),
    }
    return DataProto.from_dict(tensors, columns)


def test_rows_that_fill_a_batch_are_outside_all_numbers() -> None:
    """By hand: scores 1, 3 and 1; prompt a has nothing left to compare with; b has mean 2 and deviation sqrt(2)."""
    batch = compute_advantage(filled_batch(), "grpo")
    half = 0.5**0.5
    advantages = batch.batch["advantages"]
    torch.testing.assert_close(
        advantages[:4], torch.tensor([[0, 0], [0, 0], [half, 0], [-half, -half]]), atol=1e-5, rtol=0
    )
    assert not advantages[4:].any()
    metrics = metric_utils.compute_data_metrics(batch, use_critic=False)
    assert metrics["critic/score/mean"] == pytest.approx(5 / 3) and metrics["critic/score/min"] == 1
    assert metrics["response_length/mean"] == pytest.approx(5 / 3) and metrics["response_length/min"] == 1
    assert metrics["response/aborted_ratio"] == 0 and metrics["num_turns/mean"] == 4 and metrics["num_turns/min"] == 2

    class Controller:
        value = 0.5

        def update(self, current_kl: float, n_steps: int) -> None:
            self.seen = current_kl, n_steps

    controller = Controller()
    _, kl = apply_kl_penalty(filled_batch(), controller)
    assert kl["actor/reward_kl_penalty"] == pytest.approx(1.0) and controller.seen == (pytest.approx(1.0), 3)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_does_not_draw_them(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [compute_pf_ppo_reweight_data(filled_batch(), method, 2.0, generator) for _ in range(20)]
    assert all(batch.batch["response_mask"].any(-1).all() for batch in drawn)


def test_a_reward_function_does_not_see_them() -> None:
    def reward(data: DataProto, return_dict: bool = False) -> dict[str, Any]:
        assert len(data) == 3 and data.batch["response_mask"].any(-1).all()
        return {"reward_tensor": data.batch["response_mask"].float(), "reward_extra_info": {"acc": [1, 2, 3]}}

    scores, extras = compute_reward(filled_batch(), reward)
    assert scores.tolist() == [[1, 1], [0, 0], [1, 0], [1, 1], [0, 0], [0, 0]]
    assert extras == {"acc": [1, None, 2, 3, None, None]}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus", "remax"])
def test_a_score_on_a_token_of_a_tool_reaches_the_sampled_ones(estimator: str) -> None:
    """A manager of the user's puts the scores of two trajectories on the answer of a tool, and on padding."""
    scores = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    tensors = {
        "responses": torch.zeros(2, 5, dtype=torch.int64),
        "response_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]),
        "values": torch.zeros(2, 5),
        "reward_baselines": torch.zeros(2),
    }
    batch = DataProto.from_dict(tensors, {"uid": np.array(["a", "a"], dtype=object)})
    batch.batch["token_level_rewards"] = compute_reward(batch, lambda data: scores)[0]
    advantages = compute_advantage(batch, estimator).batch["advantages"]
    assert (advantages[0, :2] > 0).all() and not advantages[:, 2:].any()


class Scorers:
    """A reward function that says which of four responses failed, and why."""

    limits = ScoringLimits()

    def __init__(self, *reasons: str | None) -> None:
        self.reasons = list(reasons)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        scores = torch.zeros(4, WIDTH)
        scores[:, -1] = torch.tensor([1.0, -3.0, 0.0, 0.0])
        return {"reward_tensor": scores, "reward_extra_info": {"reward_failure": self.reasons}}


def scored_batch(reward_fn: Scorers) -> DataProto:
    tensors = {
        "responses": torch.zeros(4, WIDTH, dtype=torch.int64),
        "response_mask": torch.ones(4, WIDTH, dtype=torch.int64),
        "reward_baselines": torch.zeros(4),
    }
    batch = DataProto.from_dict(tensors, {"uid": np.array(["a"] * 4, dtype=object)})
    scores, extras = compute_reward(batch, reward_fn)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = scores
    for name, values in extras.items():
        batch.non_tensor_batch[name] = np.fromiter(values, dtype=object, count=4)
    return batch


def test_a_response_that_its_own_text_keeps_from_a_score_gets_the_lowest() -> None:
    batch = scored_batch(Scorers(None, None, "timed out", "raised"))
    leave_unscored_out(batch, None, STEP)
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1, -3, -3, -3]
    assert batch.batch["response_mask"].all() and "__dropped__" not in batch.non_tensor_batch


def test_a_response_leaves_its_group_if_a_service_keeps_it_from_a_score() -> None:
    """Its advantage is 0, and those of the others are as without it."""
    batch = scored_batch(Scorers(None, None, None, "unavailable"))
    leave_unscored_out(batch, None, STEP)
    assert batch.non_tensor_batch["__dropped__"].tolist() == [False, False, False, True]
    advantages = compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False).batch["advantages"][:, 0]
    torch.testing.assert_close(advantages, torch.tensor([1 + 2 / 3, -3 + 2 / 3, 2 / 3, 0.0]))
    batch.batch["attention_mask"] = torch.ones(4, 2 + WIDTH, dtype=torch.int64)
    metrics = metric_utils.compute_data_metrics(compute_advantage(batch, "grpo"), use_critic=False)
    assert (metrics["reward/failed"], metrics["reward/failed_ratio"]) == (1, 0.25)
    assert metrics["critic/score/mean"] == pytest.approx(-2 / 3)
    with pytest.raises(RewardError, match="step 3: no response could be scored: a service"):
        leave_unscored_out(scored_batch(Scorers(*["unavailable"] * 4)), None, STEP)


def test_a_step_in_which_nothing_could_be_scored_ends_the_run() -> None:
    reasons = [Reason("raised", "the scorer raised KeyError: 'a'"), Reason("invalid", "the scorer returned nan")]
    none_scored = Scorers(*reasons, *reasons)
    with pytest.raises(
        NothingScoredError, match=r"step 3: none of the 4 .*\(1\) .*KeyError: 'a'; \(2\) .*returned nan\. "
    ):
        refuse_nothing_scored(scored_batch(none_scored), STEP, none_scored)
    written = Scorers(*reasons, *reasons)
    written.limits = ScoringLimits(max_failed_ratio=1.0)
    for allowed in (Scorers(*reasons, "raised", None), written):
        refuse_nothing_scored(scored_batch(allowed), STEP, allowed)
    batch = scored_batch(Scorers(*reasons, "raised", None))
    batch.non_tensor_batch["__dropped__"] = np.array([False, False, False, True])  # it has no trajectory
    with pytest.raises(NothingScoredError, match=r"none of the 3 .*\(3\) raised\."):
        refuse_nothing_scored(batch, STEP, none_scored)
    assert pickle.loads(pickle.dumps(reasons[0])).text == reasons[0].text and reasons[0] == "raised"


def test_a_prompt_whose_baseline_is_unknown_is_not_trained() -> None:
    batch = scored_batch(Scorers(None, None, None, None))
    batch.batch["reward_baselines"] = torch.tensor([0.0, 0.0, torch.nan, torch.nan])
    leave_unscored_out(batch, None, STEP)
    assert batch.batch["response_mask"].any(-1).tolist() == [True, True, False, False]
    assert compute_advantage(batch, "remax").batch["advantages"].isfinite().all()


def test_a_step_whose_trajectories_were_all_dropped_ends_the_run() -> None:
    trainer: Any = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.run_config = RunConfig.parse(OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": SAMPLES}}}))
    trainer.state = RunState(seed=SEED, step=STEP)

    def sampled(dropped: list[bool]) -> DataProto:
        tensors = {"responses": torch.ones(2, 1), "response_mask": torch.ones(2, 1), "attention_mask": torch.ones(2, 2)}
        return DataProto.from_dict(tensors, {"__dropped__": np.array(dropped)})

    def generate(dropped: list[bool]) -> DataProto:
        batch = DataProto(non_tensor_batch={"uid": np.array(["a"], dtype=object)})
        trainer._sample = lambda *arguments: (batch, sampled(dropped), torch.zeros(2, dtype=torch.int64))
        trainer._arrange = lambda made, metrics: made
        made: DataProto = trainer.generate(batch, {}, {})
        return made

    assert len(generate([True, False])) == 2
    with pytest.raises(RuntimeError, match="step 3: all 2 trajectories were dropped .*attempts.jsonl"):
        generate([True, True])
