"""The methods of the trainer that forks override: each is called where its phase needs it."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.spin.spin_trainer import RaySPINTrainer
from verl.protocol import DataProto
from verl.protocol.lazy import by_reference
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import ray_trainer, rollouts
from verl.trainer.ppo.course import Course
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState


class Reached(Exception):
    """An override has run."""


def raising(*args, **kwargs):
    raise Reached


TOKENIZER = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [f"{row.tolist()}" for row in ids])


def prompts(count=2):
    ids = torch.ones(count, 3, dtype=torch.long)
    columns = {"data_source": np.array(["s"] * count), "raw_prompt_ids": np.array([[1]] * count, dtype=object)}
    return DataProto.from_dict(dict.fromkeys(("input_ids", "attention_mask", "position_ids"), ids), columns)


def scored():
    ids = torch.ones(2, 2, dtype=torch.long)
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.5]])
    tensors = {"prompts": ids, "responses": ids, "token_level_scores": scores}
    return DataProto.from_dict(tensors | {"attention_mask": torch.ones(2, 4, dtype=torch.long)})


def trainer_with(tmp_path, **overrides):
    """Return a trainer of a subclass with the given methods, as far as these tests run it."""
    options = {"rollout_data_dir": str(tmp_path), "log_val_generations": 1, "save_freq": 1, "logger": ["console"]}
    cls = type("Fork", (RayPPOTrainer,), overrides)
    trainer = cls.__new__(cls)
    profiler = {"steps": [1], "tool": "torch"}
    trainer.config = OmegaConf.create({"trainer": options, "global_profiler": profiler, "algorithm": {}})
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.state = RunState(seed=1, step=1, total_steps=1)
    trainer.tokenizer = TOKENIZER
    trainer.ref_in_actor = trainer.use_rm = trainer.use_critic = False
    trainer.val_reward_fn = lambda data, return_dict: {"reward_tensor": torch.ones(2, 2)}
    trainer.val_dataloader = [{"input_ids": torch.ones(2, 3)}]
    trainer.validation_generations_logger = SimpleNamespace(log=lambda *args: None)
    trainer._trackers = ["console"]
    trainer.checkpoints = SimpleNamespace(finish=lambda wait: True, is_due=lambda: True)
    trainer._generate_for_validation = lambda batch, first: scored_with_uid()
    group = SimpleNamespace(world_size=1, start_profile=lambda **kwargs: None, stop_profile=lambda: None)
    trainer.actor_rollout_wg = group
    trainer.ref_policy_wg = trainer.critic_wg = trainer.rm_wg = None
    trainer.records = SimpleNamespace(begin_step=lambda groups: None, log_attempts=lambda attempts: None)
    return trainer


def course_of(trainer):
    """Return the course of the run, as ``fit`` makes it."""
    methods = trainer._validate, trainer._save_checkpoint
    return Course(trainer.run_config, trainer.state, trainer.checkpoints, *methods, lambda *arguments: None, ())


def profiled_step(trainer):
    """Run a step that is profiled."""
    with trainer._watched({}):
        pass


def scored_with_uid():
    batch = scored()
    batch.non_tensor_batch["uid"] = np.array(["a", "b"], dtype=object)
    return batch


PHASES = {
    "_get_gen_batch": lambda trainer: trainer.generate(prompts(), {}, {}),
    "_balance_batch": lambda trainer: trainer._arrange(scored(), {}),
    "_log_rollout_data": lambda trainer: trainer._dump(scored(), {}),
    "_dump_generations": lambda trainer: trainer._dump(scored(), {}),
    "_maybe_log_val_generations": lambda trainer: trainer._validate(),
    "_validate": lambda trainer: course_of(trainer).ends_after_first_validation(),
    "_save_checkpoint": lambda trainer: course_of(trainer).save({"step": 1.0}),
    "_load_checkpoint": lambda trainer: trainer._run().__enter__(),
    "_start_profiling": lambda trainer: trainer._watched({}).__enter__(),
    "_stop_profiling": lambda trainer: profiled_step(trainer),
    "compute_rollout_importance_weights_and_add_to_batch": lambda trainer: trainer.shape(scored(), {}, {}),
}


@pytest.mark.parametrize("name", PHASES)
def test_an_override_runs(tmp_path, name):
    with pytest.raises(Reached):
        PHASES[name](trainer_with(tmp_path, **{name: raising}))


@pytest.mark.parametrize("name", ["compute_advantage", "apply_kl_penalty"])
def test_a_function_of_the_module_can_be_replaced(tmp_path, monkeypatch, name):
    trainer = trainer_with(tmp_path)
    trainer.kl_ctrl_in_reward = None
    trainer.run_config.algorithm.__dict__["use_kl_in_reward"] = name == "apply_kl_penalty"
    monkeypatch.setattr(ray_trainer, name, raising)
    with pytest.raises(Reached):
        trainer.shape(scored(), {}, {})


def shaping_in_place(self, batch):
    """Add a bonus as a recipe may, in place."""
    batch.batch["token_level_rewards"] += 1
    batch.batch["advantages"] = batch.batch["returns"] = batch.batch["token_level_rewards"]
    return batch


@pytest.mark.parametrize("lazy", [False, True])
def test_rewards_that_are_shaped_in_place_leave_the_scores(tmp_path, lazy):
    trainer, batch = trainer_with(tmp_path, add_advantages=shaping_in_place), scored()
    scores = batch.batch["token_level_scores"].clone()
    if lazy:
        kept = by_reference(batch.select(["token_level_scores"]), put=copy.deepcopy, block_bytes=1)
        batch.batch["token_level_scores"] = kept.batch["token_level_scores"]
    batch = trainer.shape(batch, {}, {})
    assert torch.equal(batch.batch["token_level_scores"] + 0, scores)
    assert torch.equal(batch.batch["token_level_rewards"] + 0, scores + 1)
    batch.batch["response_mask"] = torch.ones(2, 2)
    metrics = compute_data_metrics(batch, use_critic=False)
    assert (metrics["critic/score/mean"], metrics["critic/rewards/mean"]) == (0.75, 2.75)


def test_spin_copies_the_scores_too():
    trainer = RaySPINTrainer.__new__(RaySPINTrainer)
    trainer.state = RunState(seed=1, step=1, total_steps=1)
    batch = scored()
    batch.batch["response_mask"] = torch.ones(2, 2)
    tensors = trainer.shape(batch, {}, {}).batch
    assert tensors["token_level_rewards"] is not tensors["token_level_scores"]
    assert torch.equal(tensors["token_level_rewards"], tensors["token_level_scores"])


def test_a_trainer_of_large_batches_keeps_its_memory(tmp_path, monkeypatch):
    """Two rows of 32 MB, which are views of one number, and what a small run receives."""
    kept = []
    monkeypatch.setattr(rollouts, "keep_freed_host_memory", lambda: kept.append(True))
    monkeypatch.setattr(rollouts, "check_rollout", lambda *arguments: None)
    trainer = trainer_with(tmp_path)
    for width, expected in ((1 << 10, []), (1 << 23, [True])):
        output = DataProto.from_dict({"responses": torch.zeros(1, 1).expand(2, width)})
        trainer.rollouts.receive(output, output, {}, {})
        assert kept == expected


def test_the_captures_of_a_loop_of_a_fork(tmp_path):
    calls = []
    trainer = trainer_with(tmp_path)
    trainer.actor_rollout_wg.start_profile = lambda **options: calls.append(options)
    trainer.actor_rollout_wg.stop_profile = lambda: calls.append("stop")
    for is_listed in (False, True):
        trainer._start_profiling(is_listed)
        trainer._stop_profiling(is_listed)
    assert calls == [{"role": "e2e", "profile_step": "1"}, "stop"]


def test_prompts_of_a_fork_have_no_uid_yet(tmp_path):
    batch = prompts()
    requests = trainer_with(tmp_path)._get_gen_batch(batch)
    assert set(requests.non_tensor_batch) == {"raw_prompt_ids"} and set(batch.non_tensor_batch) == {"data_source"}
    batch.union(requests)


def test_a_fork_writes_its_samples(tmp_path):
    trainer = trainer_with(tmp_path)
    trainer.state.row_order = [1, 0, 2]  # of a larger batch, which the fork has cut
    timing = {}
    trainer._log_rollout_data(scored(), {"acc": [1, 0], "of_all_draws": [1, 2, 3]}, timing, str(tmp_path / "mine"))
    rows = [json.loads(line) for line in (tmp_path / "mine" / "1.jsonl").read_text().splitlines()]
    assert [(row["score"], row["acc"]) for row in rows] == [(1.0, 1), (0.5, 0)] and "of_all_draws" not in rows[0]
    assert "dump_rollout_generations" in timing
