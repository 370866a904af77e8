"""Validation without a trainer: samples of a loader, generated and scored by plain functions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.validation import choose_samples, collect_samples, repeat_prompts, summarise

TOKENIZER = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(row.tolist()) for row in ids])


def rows(*tokens: int, style: str = "rule") -> dict:
    judged = [{"ground_truth": str(token), "style": style} for token in tokens]
    return {
        "input_ids": torch.tensor(tokens).unsqueeze(-1),
        "reward_model": np.array(judged, dtype=object),
        "data_source": np.array(["s"] * len(tokens), dtype=object),
    }


class Rollout:
    """Answers each prompt twice: with its token, and with the next one."""

    def __init__(self):
        self.first_prompts = []

    def __call__(self, prompts: DataProto, first_prompt: int) -> DataProto:
        self.first_prompts.append(first_prompt)
        batch, seeds = repeat_prompts(prompts, 2, seed=1, step=3, first_prompt=first_prompt)
        assert len(seeds.unique()) == len(batch)
        batch.batch["prompts"] = batch.batch["input_ids"]
        batch.batch["responses"] = batch.batch["input_ids"] + torch.arange(len(batch)).unsqueeze(-1) % 2
        return batch


def reward(data: DataProto, return_dict: bool) -> dict:
    right = (data.batch["responses"] == data.batch["prompts"]).float()
    return {"reward_tensor": right, "reward_extra_info": {"acc": right[:, 0].tolist()}}


def test_samples_of_all_batches_are_collected_and_summarised():
    rollout = Rollout()
    samples = collect_samples([rows(4, 5), rows(6)], rollout, reward, TOKENIZER, step=3)
    assert rollout.first_prompts == [0, 2]
    assert samples.inputs == [f"[{token}]" for token in (4, 4, 5, 5, 6, 6)]
    assert samples.outputs == [f"[{token}]" for token in (4, 5, 5, 6, 6, 7)]
    assert samples.truths == ["4", "4", "5", "5", "6", "6"] and samples.scores == [1.0, 0.0] * 3
    assert len(set(samples.uids)) == 3
    assert summarise(samples)["val-core/s/acc/mean@2"] == 0.5
    chosen = [choose_samples(samples.inputs, samples.outputs, samples.scores, count) for count in (2, 6)]
    assert chosen[0] == chosen[1][:2]


def test_rows_for_a_reward_model_have_no_metrics():
    rollout = Rollout()
    judged = [rows(4, style="model")]
    assert collect_samples(judged, rollout, reward, TOKENIZER, step=3, with_reward_model=True) is None
    assert rollout.first_prompts == []
    assert collect_samples(judged, rollout, reward, TOKENIZER, step=3) is not None


def test_a_validation_reward_function_is_needed():
    with pytest.raises(ValueError, match="val_reward_fn of the trainer is None"):
        collect_samples([rows(4)], Rollout(), None, TOKENIZER, step=3)
