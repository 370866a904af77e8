"""A small run whose configuration is right, and the composition of others from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.composition import composed_config

CONFIG_DIR = str(Path(__file__).resolve().parents[3] / "verl" / "trainer" / "config")


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a run on two CPU workers, whose files exist."""
    folder = tmp_path_factory.mktemp("run")
    sizes = {"max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "rows.parquet").write_text("rows")
    (folder / "reward.py").write_text("def score(data_source, solution_str):\n    return 0.0\n")
    return [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console]",
        f"data.train_files={folder}/rows.parquet",
        f"data.val_files={folder}/rows.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={folder}",
        f"critic.model.path={folder}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    ]


@pytest.fixture(scope="session")
def composed(small_run: list[str]) -> Callable[..., DictConfig]:
    """Compose ``ppo_trainer`` with the overrides of the small run and then the given ones."""

    def make(
        *overrides: str, name: str = "ppo_trainer", base: bool = True, folder: str | Path = CONFIG_DIR
    ) -> DictConfig:
        return composed_config(Path(folder), name, overrides, small_run if base else ())

    return make
