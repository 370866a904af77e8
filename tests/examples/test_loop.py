"""The loop in one file: what it imports, what the page shows of it, and that it trains as `main_ppo` does."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from examples import loop
from examples.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = 3
PPO = {
    "algorithm.adv_estimator": "grpo",
    "data.val_files": "null",
    "data.shuffle": "false",
    "data.train_batch_size": 8,
    "data.max_prompt_length": 128,
    "data.max_response_length": 16,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "custom_reward_function.path": ROOT / "examples/loop.py",
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[file]",
    "trainer.report": "false",
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": "false",
    "trainer.test_freq": -1,
    "trainer.save_freq": STEPS,
}
"""The settings of the loop, as keys of `main_ppo`."""


def call(*command: object, folder: Path = ROOT) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_ROOT": str(folder)}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_it_needs_neither_the_trainer_nor_hydra() -> None:
    loaded = call("-c", "import sys, examples.loop; print(*sys.modules)").split()
    assert "verl.workers.fsdp_workers" in loaded
    assert not [name for name in loaded if name.startswith(("verl.trainer", "hydra"))]


def test_the_page_shows_its_loop() -> None:
    assert inspect.getsource(loop.train).strip() in (ROOT / "docs/architecture.md").read_text()


@pytest.mark.full
def test_it_gives_the_weights_of_main_ppo(tmp_path: Path) -> None:
    model = make_tiny_model(str(tmp_path / "model"), hidden_size=128, num_layers=2, seed=0)
    prompts = [[{"role": "user", "content": f"say {number * 7919 % 1000}"}] for number in range(32)]
    rows = [
        {"data_source": "digits", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "digits"}}
        for prompt in prompts
    ]
    data = tmp_path / "train.parquet"
    pd.DataFrame(rows).to_parquet(data)
    paths = ("--model", model, "--data", data, "--out", tmp_path / "loop")
    printed = call(ROOT / "examples/loop.py", *paths, "--steps", STEPS, folder=tmp_path)
    assert printed.count("score") == STEPS
    given = PPO | {
        "data.train_files": data,
        "actor_rollout_ref.model.path": model,
        "trainer.default_local_dir": tmp_path / "ppo",
    }
    call("-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in given.items()), folder=tmp_path)
    name = "model_world_size_1_rank_0.pt"
    ours, theirs = (
        torch.load(tmp_path / folder / name, weights_only=False)
        for folder in ("loop", f"ppo/global_step_{STEPS}/actor")
    )
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        assert torch.equal(torch.as_tensor(weight), torch.as_tensor(theirs[key])), key
