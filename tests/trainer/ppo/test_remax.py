"""ReMax in the loop: one greedy response per prompt, its score subtracted from every sample of that prompt."""

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState

WORKERS, SAMPLES, PROMPTS, WIDTH = 2, 2, 3, 4


class Rollout:
    """Answers with a number of tokens that is the prompt's, one more by chance; refuses rows that it cannot share."""

    world_size = WORKERS

    def __init__(self) -> None:
        self.greedy_rows: list[int] = []

    def generate_sequences(self, requests: DataProto) -> DataProto:
        assert len(requests) % WORKERS == 0
        greedy = not requests.meta_info.get("do_sample", True)
        if greedy:
            self.greedy_rows.append(len(requests))
        prompts = requests.batch["input_ids"]
        length = prompts[:, -1] + (0 if greedy else requests.batch["sampling_seed"] % 2)
        mask = (torch.arange(WIDTH) < length.unsqueeze(-1)).long()
        responses = torch.where(mask.bool(), 5, 0)
        attention = torch.cat([requests.batch["attention_mask"], mask], dim=-1)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=-1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
        }
        meta = {"eos_token_id": [9], "pad_token_id": 0, "timing": {"generate_sequences": 1.0}}
        return DataProto.from_dict(tensors, {"uid": requests.non_tensor_batch["uid"]}, meta_info=meta)


def reward(data: DataProto, return_dict: bool = False) -> dict[str, Any]:
    """Score the number of tokens, on the last of them; those of three count as not scored."""
    mask = data.batch["response_mask"]
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(mask)), mask.sum(-1) - 1] = mask.sum(-1).float()
    reasons = ["raised" if length == 3 else None for length in mask.sum(-1).tolist()]
    return {"reward_tensor": scores, "reward_extra_info": {"reward_failure": reasons}}


reward.lowest_score = 3.0  # type: ignore[attr-defined]  # of responses that are not scored


def make_trainer(adv_estimator: str = "remax") -> RayPPOTrainer:
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    algorithm = {"adv_estimator": adv_estimator, "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    algorithm |= {"use_kl_in_reward": False, "rollout_is_threshold": None, "rollout_is": False}
    trainer.config = OmegaConf.create(
        {
            "algorithm": algorithm,
            "actor_rollout_ref": {"rollout": {"n": SAMPLES, "tensor_model_parallel_size": 1}},
        }
    )
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.actor_rollout_wg = Rollout()
    trainer.reward_fn = reward
    trainer.use_rm = False
    trainer.device_name = "cpu"
    trainer.state = RunState(seed=1, step=3)
    return trainer


def test_the_greedy_score_is_the_baseline_of_each_prompt() -> None:
    trainer, metrics, timing = make_trainer(), {}, {}
    prompts = torch.tensor([[7, 1], [7, 2], [7, 3]])
    ones = torch.ones_like(prompts)
    rows = {"input_ids": prompts, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
    batch = trainer.generate(trainer.prepare(rows), metrics, timing)
    assert trainer.actor_rollout_wg.greedy_rows == [4]  # three prompts, and one that makes them divide
    assert batch.batch["reward_baselines"].tolist() == batch.batch["prompts"][:, -1].tolist()
    assert metrics["greedy/reward/failed"] == 1 and metrics["greedy/reward/failed_ratio"] == pytest.approx(1 / 3)
    assert "gen_max" in timing and timing["generate_sequences"] == 1.0  # the greedy pass is in its own timer only
    batch = trainer.shape(trainer.score(batch, metrics, timing), metrics, timing)
    mask = batch.batch["response_mask"]
    lucky = mask.sum(-1) - batch.batch["prompts"][:, -1]
    assert 0 < lucky.sum() < len(batch) == PROMPTS * SAMPLES
    torch.testing.assert_close(batch.batch["advantages"], lucky.unsqueeze(-1) * mask.float())
    torch.testing.assert_close(batch.batch["returns"], mask.sum(-1, keepdim=True) * mask.float())
    assert sorted(np.unique(batch.non_tensor_batch["uid"], return_counts=True)[1]) == [SAMPLES] * PROMPTS


def test_the_greedy_pass_does_not_change_what_is_sampled() -> None:
    responses = []
    for name in ("remax", "grpo"):
        trainer = make_trainer(name)
        prompts = torch.tensor([[7, 1], [7, 2], [7, 3]])
        ones = torch.ones_like(prompts)
        rows = {"input_ids": prompts, "attention_mask": ones, "position_ids": ones}
        batch = trainer.generate(trainer.prepare(rows), {}, {})
        assert ("reward_baselines" in batch.batch.keys()) == (name == "remax")
        responses.append(batch.batch["responses"])
    torch.testing.assert_close(*responses)
