"""Whole runs on one GPU: Ray, FSDP with NCCL, generation, checkpoints, replay; and supervised training."""

import importlib.util
import json

import pandas as pd
import pytest

from tests.special_e2e.conftest import PYTHON, Workspace, assert_bit_for_bit, call

pytestmark = pytest.mark.timeout(1200)

ON_GPU = {
    "trainer.device": "cuda",
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.name": "hf",
}
BF16 = {
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "{param_dtype:bf16,reduce_dtype:fp32}",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
}
OFFLOAD = {
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
}
LIGER = BF16 | {"actor_rollout_ref.model.use_liger": True}
NO_LIGER = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")


def test_a_run_is_stopped_and_replayed(workspace):
    """The second run ends after two steps and is resumed: numbers and digests are those of the first."""
    settings = ON_GPU | {"trainer.save_freq": 2}
    whole = workspace.train("gpu-whole", settings)
    workspace.train("gpu-resumed", settings | {"trainer.total_training_steps": 2})
    resumed = workspace.train("gpu-resumed", settings)
    assert_bit_for_bit(resumed, whole, (3, 4))
    for step in range(1, 5):
        assert abs(whole.steps[step]["training/rollout_probs_diff_max"]) < 1e-4  # fp32, two ways to compute
        assert whole.steps[step]["perf/max_memory_allocated_gb"] > 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bf16", BF16),
        ("offload", OFFLOAD | {"actor_rollout_ref.actor.strategy": "fsdp2"}),
        pytest.param("liger", LIGER, marks=NO_LIGER),
    ],
)
def test_shared_prefixes_and_a_critic(workspace, name, changes):
    ppo = {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": workspace.model,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "critic.model.use_remove_padding": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.model.use_prefix_sharing": True,
        "trainer.total_training_steps": 2,
    }
    run = workspace.train(f"gpu-ppo-{name}", ON_GPU | ppo | changes)
    assert run.steps[2]["actor/grad_norm"] > 0 and run.steps[2]["critic/grad_norm"] > 0


def test_supervised_training_gives_the_numbers_of_the_cpu(workspace: Workspace) -> None:
    """Conversations with a common opening, with and without shared prefixes, in fp32."""
    opening = {"role": "system", "content": "count and say which number comes next, " * 2}
    talks = [
        [opening, {"role": "user", "content": f"{i} ?"}, {"role": "assistant", "content": f"{i + 1}"}]
        for i in range(16)
    ]
    pd.DataFrame({"messages": talks}).to_parquet(workspace.folder / "counting.parquet")
    found = {}
    for device, shares in (("cpu", False), ("cuda", False), ("cuda", True)):
        name = f"sft-{device}-{shares}"
        options = {
            "data.train_files": workspace.folder / "counting.parquet",
            "data.train_batch_size": 8,
            "data.max_length": 128,
            "data.max_token_len_per_gpu": 1024,
            "model.path": workspace.model,
            "model.use_remove_padding": True,
            "model.use_prefix_sharing": shares,
            "engine.model_dtype": "fp32",
            "engine.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32}",
            "optim.lr": 1e-3,
            "trainer.device": device,
            "trainer.logger": "[file]",
            "trainer.total_epochs": 2,
            "trainer.default_local_dir": workspace.folder / name,
        }
        words = [f"{key}={value}" for key, value in options.items()]
        unseen = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        log = workspace.folder / f"{name}.jsonl"
        call([*PYTHON, "verl.trainer.sft_trainer", *words], VERL_FILE_LOGGER_PATH=log, **unseen)
        lines = [json.loads(line)["data"] for line in log.read_text().splitlines()]
        if shares:
            assert all(line["train/computed_tokens"] < 0.7 * line["train/global_tokens"] for line in lines)
        found[device, shares] = [[line["train/loss"], line["train/grad_norm"]] for line in lines]
    expected = found["cpu", False]
    assert len(expected) == 4
    for numbers in (found["cuda", False], found["cuda", True]):
        assert numbers[0] == pytest.approx(expected[0], rel=1e-4)  # fp32, summed in another order
        # AdamW takes a step of its learning rate also where a gradient is nothing but rounding.
        assert numbers[1:] == [pytest.approx(step, rel=1e-2) for step in expected[1:]]
