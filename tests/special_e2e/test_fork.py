"""A fork written for the established framework trains here, unedited."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.special_e2e.conftest import REPOSITORY

FORK = REPOSITORY / "tests/special_e2e/fork"
WANTED, SAMPLES = 4, 4


@pytest.fixture(scope="module")
def fork(workspace, preloaded_workers):
    """Train two steps of the fork with dynamic sampling; return the run and the lines of its own log."""
    folder = workspace.folder / "fork"
    folder.mkdir()
    lines = [f"say {i * 7919 % 1000} and {'more' * (i % 5)}" for i in range(64)]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "test.txt").write_text("\n".join(lines[:6]))
    overrides = {
        "algorithm.adv_estimator": "letters_mean",
        "algorithm.letters_bonus": 0.01,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 20,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "letters_clip",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "data.train_files": folder / "train.txt",
        "data.val_files": folder / "test.txt",
        "data.train_batch_size": WANTED,
        "data.gen_batch_size": 4,
        "data.custom_cls.path": FORK / "dataset.py",
        "data.custom_cls.name": "QuestionLines",
        "custom_reward_function.path": FORK / "reward.py",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "trainer.rollout_data_dir": folder / "rollouts",
        "hydra.run.dir": folder / "hydra",
    }
    path = os.pathsep.join([str(FORK.parent), preloaded_workers["PYTHONPATH"]])
    env = {"PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl")}
    run = workspace.train("fork", overrides, env=env, module="fork.main_fork")
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return run, {line["step"]: line["data"] for line in logged}


def test_a_fork_with_dynamic_sampling_trains_two_steps(fork, workspace):
    run, steps = fork
    assert sorted(steps) == [1, 2]
    assert any(numbers["train/num_gen_batches"] > 1 for numbers in steps.values())
    for step, numbers in steps.items():
        assert numbers["actor/grad_norm"] > 0 and numbers["actor/kl_loss"] >= 0 and numbers["timing_s/gen"] > 0
        assert not any(name.startswith("critic/v") for name in numbers)  # its critic is mapped, and not needed
        scores, texts = defaultdict(set), set()
        for row in map(json.loads, (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()):
            scores[row["input"]].add(row["score"])
            texts.add(row["output"])
        assert list(scores.values()) == [{0.0, 1.0}] * WANTED  # the groups vary, as the filter wants
        assert len(texts) > WANTED * SAMPLES / 2  # seeds differ, though the loop sends none
    assert steps[2]["val-core/letters/acc/mean@1"] == steps[2]["val-aux/letters/score/mean@1"]
    before = load_file(Path(workspace.model, "model.safetensors"))
    after = load_file(run.folder / "global_step_2" / "actor" / "huggingface" / "model.safetensors")
    same = {name for name, value in before.items() if torch.equal(after[name].to(value.dtype), value)}
    assert same == {"model.embed_tokens.weight"}  # which the worker of the fork freezes
