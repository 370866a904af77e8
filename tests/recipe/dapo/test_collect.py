"""Dynamic sampling in the trainer, over a rollout that answers by the seed of the request."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer, joined
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.state import RunState
from verl.utils.dataset.factory import SeededRandomSampler
from verl.utils.numerics.seeding import prompt_uids, sampling_seeds

ROWS, DRAWN, PROMPTS, SAMPLES, STEPS = 12, 4, 3, 2, 4


class Prompts(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ones = torch.ones(2, dtype=torch.long)
        return {
            "input_ids": ones * (index + 5),
            "attention_mask": ones,
            "position_ids": ones.cumsum(0) - 1,
            "extra_info": {"index": index},
        }


def answer(requests: DataProto) -> DataProto:
    """Answer with one token or two, which the seed decides."""
    prompts, seeds = requests.batch["input_ids"], requests.batch["sampling_seed"]
    mask = torch.stack([torch.ones_like(seeds), seeds % 2], 1)
    responses = (seeds[:, None] % torch.tensor([97, 89]) + 3) * mask
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([requests.batch["attention_mask"], mask], 1),
        "position_ids": torch.arange(4).expand(len(prompts), 4).clone(),
    }
    meta = {"pad_token_id": 0, "timing": {"generate_sequences": 2.0, "generation_timing/max": 3.0}}
    return DataProto.from_dict(tensors, meta_info=meta)


def indices(data: DataProto) -> np.ndarray:
    return np.array([info["index"] for info in data.non_tensor_batch["extra_info"]])


def reward(data: DataProto, return_dict: bool) -> dict:
    """Two tokens are right, but never for every third prompt; some responses are remarkable."""
    right = data.batch["response_mask"][:, 1].bool().numpy() & (indices(data) % 3 != 0)
    extras = {"acc": right.tolist()}
    if data.batch["responses"][:, 0].max() > 80:
        extras["remark"] = [token > 80 for token in data.batch["responses"][:, 0].tolist()]
    scores = (
        torch.zeros(data.batch["responses"].shape).index_fill_(1, torch.tensor(0), 1.0) * torch.tensor(right)[:, None]
    )
    return {"reward_tensor": scores, "reward_extra_info": extras}


def make_trainer(world_size: int = 1, **groups) -> RayDAPOTrainer:
    data = {
        "train_batch_size": PROMPTS,
        "gen_batch_size": DRAWN,
        "dataloader_num_workers": 0,
        "shuffle": True,
        "seed": 5,
    }
    trainer = RayDAPOTrainer.__new__(RayDAPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "data": data,
            "trainer": {"total_epochs": 1, "total_training_steps": STEPS},
            "actor_rollout_ref": {"rollout": {"n": SAMPLES}},
            "algorithm": {
                "adv_estimator": "grpo",
                "filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 0} | groups,
            },
        }
    )
    trainer.state = RunState(seed=1, total_steps=STEPS)
    trainer.use_rm = False
    trainer.device_name = "cpu"
    trainer.reward_fn = reward
    trainer.actor_rollout_wg = SimpleNamespace(world_size=world_size, generate_sequences=answer)
    trainer.run_config = RunConfig.parse(trainer.config)
    sampler = SeededRandomSampler(Prompts(), seed=5)
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, Prompts(), None, sampler)
    return trainer


def collect_steps(trainer: RayDAPOTrainer, until: int = STEPS) -> list[tuple[DataProto, dict, dict]]:
    """Collect the batches of the next steps as ``fit`` does; the rows in the order in which they were asked for."""
    rows = trainer._training_rows()
    steps = []
    while trainer.global_steps < until:
        trainer.state.begin_step()
        metrics, timing = {}, {}
        batch = trainer.collect(rows, metrics, timing)
        steps.append((batch.select_idxs(torch.tensor(trainer.state.row_order)), metrics, timing))
    return steps


@pytest.fixture(scope="module")
def steps():
    return collect_steps(make_trainer())


def content(step) -> list[list]:
    batch, extras = step[0], step[0].non_tensor_batch
    tensors = [batch.batch[key].tolist() for key in sorted(batch.batch.keys())]
    return tensors + [extras[key].tolist() for key in sorted(extras)]


def test_steps_are_full_of_varied_prompts_in_the_order_of_the_data(steps):
    """The reference draws batch after batch itself, and keeps what the reward function tells apart."""
    rows = make_trainer()._training_rows()
    for number, (batch, metrics, _) in enumerate(steps, start=1):
        kept, drawn = [], 0
        while len(kept) < PROMPTS:
            drawn_indices = [info["index"] for info in next(rows)["extra_info"]]
            seeds = sampling_seeds(1, number, DRAWN, SAMPLES, first_prompt=drawn).view(DRAWN, SAMPLES)
            uids = prompt_uids(1, number, DRAWN, first_prompt=drawn)
            for index, uid, pair in zip(drawn_indices, uids, seeds.tolist(), strict=True):
                if index % 3 and pair[0] % 2 != pair[1] % 2:
                    kept.append((index, uid, pair))
            drawn += DRAWN
        expected = [(index, uid, seed) for index, uid, pair in kept[:PROMPTS] for seed in pair]
        columns = (
            indices(batch).tolist(),
            batch.non_tensor_batch["uid"],
            batch.batch["responses"][:, 0].tolist(),
        )
        assert list(zip(*columns, strict=True)) == [(index, uid, seed % 97 + 3) for index, uid, seed in expected]
        assert batch.batch["token_level_scores"].sum(-1).tolist() == [float(seed % 2) for _, _, seed in expected]
        assert metrics["train/num_gen_batches"] == drawn / DRAWN and metrics["train/num_prompts_drawn"] == drawn
        assert metrics["train/num_prompts_surplus"] == len(kept) - PROMPTS
        assert metrics["train/num_prompts_dropped"] == drawn - len(kept)
        assert batch.meta_info["global_steps"] == number
    assert len({metrics["train/num_gen_batches"] for _, metrics, _ in steps}) > 1


def test_what_only_some_draws_know_is_none_in_the_others(steps):
    remarks = [batch.non_tensor_batch.get("remark", np.array([None])) for batch, _, _ in steps]
    assert any(None in column and (True in column or False in column) for column in remarks)


def test_draws_with_other_images_are_joined():
    """Prompts of two draws show images of other sizes, and the step counts the patches of all."""
    trainer = make_trainer()
    parts = []
    for side in (2, 4):
        batch = DataProto.from_dict({"attention_mask": torch.ones(2, 3, dtype=torch.long)})
        grids = [{"image_grid_thw": torch.tensor([[1, side, side]])} for _ in range(2)]
        batch.non_tensor_batch["multi_modal_inputs"] = np.array(grids, dtype=object)
        parts.append(trainer._arrange(batch, {}))
    assert [part.meta_info["images_seqlens"] for part in parts] == [[4, 4], [16, 16]]
    assert sorted(trainer._arrange(joined(parts), {}).meta_info["images_seqlens"]) == [4, 4, 16, 16]


def test_seconds_of_all_draws_add_up(steps):
    for _, metrics, timing in steps:
        assert timing["generate_sequences"] == 2.0 * metrics["train/num_gen_batches"]
        assert timing["generation_timing/max"] == 3.0 and timing["gen"] > 0


def test_the_ranks_share_the_rows_and_do_not_choose_them(steps):
    for alone, shared in zip(steps, collect_steps(make_trainer(world_size=2)), strict=True):
        assert content(alone) == content(shared)
        tokens = alone[0].batch["attention_mask"].sum(-1)
        assert sorted(shared[0].meta_info["global_token_num"]) == sorted(tokens.tolist())


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_resumed_run_draws_and_keeps_the_same(steps, stop):
    first, second = make_trainer(), make_trainer()
    collect_steps(first, until=stop)
    second.train_dataloader.load_state_dict(first.train_dataloader.state_dict())
    second.state.step = stop
    second.state.epoch = first.state.epoch
    assert [content(step) for step in collect_steps(second)] == [content(step) for step in steps[stop:]]


def test_without_the_filter_a_step_is_one_draw():
    trainer = make_trainer(enable=False)
    (batch, metrics, _), *_ = collect_steps(trainer, until=1)
    assert len(batch) == DRAWN * SAMPLES and metrics["train/num_gen_batches"] == 1
    assert (
        "token_level_scores" not in batch.batch.keys() and trainer.state.pending_reward is not None
    )  # `shape` takes it


def test_a_limit_that_is_reached_ends_the_run():
    with pytest.raises(ValueError, match="max_num_gen_batches=1: 1 draws kept"):
        collect_steps(make_trainer(max_num_gen_batches=1))


def test_data_that_give_nothing_end_the_run():
    """12 rows are 3 draws; the least that is looked at are 10, in as many passes as that takes."""
    trainer = make_trainer(max_num_gen_batches=0)
    trainer.reward_fn = lambda data, return_dict: {
        "reward_tensor": torch.zeros(data.batch["responses"].shape),
        "reward_extra_info": {"acc": [False] * len(data)},
    }
    with pytest.raises(ValueError, match="nothing was kept in 10 draws in a row: 10 draws kept 0 prompts of 40"):
        collect_steps(trainer)
    assert trainer.state.epoch == 3
