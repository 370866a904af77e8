"""PRIME's phases in its trainer: the filter, the order of update and scores, and the advantages of outcomes alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.prime.prime_fsdp_workers import REFERENCE
from recipe.prime.prime_ray_trainer import RayPRIMETrainer, compared, outcome_of
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.state import RunState

SAMPLES, WIDTH = 2, 4
LENGTHS = [1, 2, 3, 4, 2, 2, 3, 1]
OUTCOMES = [1.0, 0, 0, 0, 1, 1, 0, 1]


class RewardModel:
    """A worker group whose log-ratios double with each update; it writes down what it is asked."""

    world_size = 1

    def __init__(self):
        self.calls = []
        self.scale = 1.0

    def answer(self, name, data):
        self.calls.append((name, sorted([*data.batch.keys(), *data.non_tensor_batch])))
        ratio = self.scale * torch.arange(1.0, len(data) * WIDTH + 1).view(-1, WIDTH) * data.batch["response_mask"]
        tensors = {"rm_scores": 0.1 * ratio, "q": ratio, REFERENCE: torch.zeros_like(ratio)}
        return DataProto.from_dict(tensors, meta_info={"metrics": {"reward_model/seen": [1.0]}})

    def compute_rm_score(self, data):
        return self.answer("score", data)

    def update_rm(self, data):
        output = self.answer("update", data)
        self.scale *= 2
        return output


def batch_of() -> DataProto:
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(-1)).long()
    rows = len(LENGTHS)
    tensors = {
        "prompts": torch.ones(rows, 2, dtype=torch.long),
        "responses": torch.arange(rows * WIDTH).view(rows, WIDTH),
        "response_mask": mask,
        "input_ids": torch.ones(rows, 2 + WIDTH, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(rows, 2, dtype=torch.long), mask], 1),
        "position_ids": torch.arange(2 + WIDTH).expand(rows, -1).clone(),
        "acc": torch.tensor(OUTCOMES),
        "token_level_scores": torch.zeros(rows, WIDTH),
    }
    uids = np.repeat(np.array(["a", "b", "c", "d"], dtype=object), SAMPLES)
    return DataProto.from_dict(tensors, non_tensors={"uid": uids})


def make_trainer(**changes) -> RayPRIMETrainer:
    tree = OmegaConf.create(
        {
            "data": {
                "_target_": "recipe.prime.config.PRIMEDataConfig",
                "train_batch_size": 2,
                "oversample_factor": 2.0,
            },
            "trainer": {"balance_batch": False},
            "actor_rollout_ref": {"rollout": {"n": SAMPLES}},
            "algorithm": {"_target_": "recipe.prime.config.PRIMEAlgoConfig"},
            "reward_model": {
                "_target_": "recipe.prime.config.PRIMERewardModelConfig",
                "enable": True,
                "micro_batch_size_per_gpu": 1,
                "mini_batch_size": 2,
                "model": {"_target_": "recipe.prime.config.PRIMEModelConfig", "path": "m/m", "ref_path": "m/m"},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(tree, key.replace("__", "."), value)
    trainer = RayPRIMETrainer.__new__(RayPRIMETrainer)
    trainer.config = tree
    trainer.run_config = RunConfig.parse(tree)
    trainer.state = RunState(seed=1, step=1, total_steps=2)
    trainer.rm_wg = RewardModel()
    trainer.actor_rollout_wg = SimpleNamespace(world_size=1)
    trainer._read_nodes()
    return trainer


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, ["a", "d"]),  # b is never right and full, c always right
        ({"data__filter_accuracy": False}, ["a", "c"]),
        ({"data__filter_accuracy": False, "data__filter_truncate": False}, ["a", "b"]),
        ({"data__accuracy_upper_bound": 1.0}, ["a", "c"]),
        ({"data__oversample_factor": 4.0}, ["a"]),
    ],
)
def test_it_keeps_whole_prompts_the_preferred_ones_first(changes, kept):
    batch = make_trainer(**changes).filter_and_downsample(OUTCOMES, batch_of())
    assert batch.non_tensor_batch["uid"].tolist() == [uid for uid in kept for _ in range(SAMPLES)]


CALLS = {
    ("before", "ce"): (["update", "score"], 2.0, ("", "_before")),
    ("after", "ce"): (["update"], 1.0, ("",)),
    ("reverse", "ce"): (["score", "update"], 1.0, ("",)),
    ("none", "ce"): (["score"], 1.0, ("",)),
    ("before", "dpo"): (["score", "update", "score"], 2.0, ("", "_before")),
    ("after", "dpo"): (["score", "update"], 1.0, ("",)),
}


@pytest.mark.parametrize(("update", "loss_type"), CALLS)
def test_the_reward_model_learns_when_it_should(update, loss_type):
    calls, scale, suffixes = CALLS[update, loss_type]
    trainer = make_trainer(reward_model__model__update=update, reward_model__model__loss_type=loss_type)
    batch = batch_of()
    batch.non_tensor_batch["multi_modal_inputs"] = np.array([{}] * len(batch), dtype=object)  # it sees images too
    output, metrics = trainer.compute_reward(batch, SAMPLES)
    assert all("multi_modal_inputs" in keys for _, keys in trainer.rm_wg.calls)
    assert [name for name, _ in trainer.rm_wg.calls] == calls
    assert all(REFERENCE in keys for _, keys in trainer.rm_wg.calls[1:])  # the reference is asked once
    expected = scale * torch.arange(1.0, 33).view(-1, WIDTH) * batch.batch["response_mask"]
    assert torch.equal(output.batch["q"], expected)
    assert {name for name in metrics if "dpo_acc" in name} == {
        f"reward_model/dpo_acc{kind}{suffix}" for kind in ("", "_abs") for suffix in suffixes
    }
    assert metrics["reward_model/raw_reward"] == pytest.approx(expected.sum(-1).mean().item())
    if loss_type == "dpo":
        assert {"rm_rival", "rm_side", "rm_weight"} <= set(trainer.rm_wg.calls[1][1])


@pytest.mark.parametrize("enable", [True, False])
def test_outcomes_alone_give_the_formula_by_hand(enable):
    """Without the reward model, returns are 5 times outcome minus that of the other sample, at each token."""
    trainer = make_trainer(algorithm__reward_dpo_coef=0, reward_model__enable=enable)
    batch = trainer.shape(batch_of(), {}, {})
    assert bool(trainer.rm_wg.calls) == enable
    mask = batch.batch["response_mask"]
    difference = torch.tensor([5.0, -5, 0, 0, 0, 0, -5, 5])
    torch.testing.assert_close(batch.batch["returns"], difference.unsqueeze(-1) * mask)
    values = [value for value, length in zip(difference.tolist(), LENGTHS, strict=True) for _ in range(length)]
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    torch.testing.assert_close(batch.batch["advantages"], (difference.unsqueeze(-1) - mean) / deviation * mask)


def test_scores_of_tokens_change_the_advantages():
    with_model = make_trainer().shape(batch_of(), {}, {}).batch["advantages"]
    without = make_trainer(algorithm__reward_dpo_coef=0).shape(batch_of(), {}, {}).batch["advantages"]
    assert not torch.equal(with_model, without)


def test_the_outcome_is_what_the_reward_function_calls_so():
    batch = batch_of()
    assert outcome_of(batch).tolist() == OUTCOMES
    del batch.batch["acc"]
    batch.batch["token_level_scores"][:, 0] = torch.tensor(OUTCOMES) * 2 - 1
    assert outcome_of(batch).tolist() == [value * 2 - 1 for value in OUTCOMES]
    batch.non_tensor_batch["acc"] = np.array([value > 0 for value in OUTCOMES], dtype=object)
    assert outcome_of(batch).tolist() == OUTCOMES


def test_each_row_has_its_own_outcome():
    """Of two data sources only one says ``acc``; a response that is missing is compared with no other."""
    mask = torch.tensor([[1], [1], [0], [1]])
    columns = {"acc": np.array([1.0, None, 0.0, None], dtype=object), "uid": np.array(list("aaab"), dtype=object)}
    tensors = {"token_level_scores": torch.tensor([[-1.0], [0.5], [0.0], [1.0]]), "response_mask": mask}
    batch = DataProto.from_dict(tensors, columns)
    assert outcome_of(batch).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert compared(batch).tolist() == ["a", "a", "row 2", "b"]
