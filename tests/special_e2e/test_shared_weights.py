"""Whole runs in which trainer and engine hold one copy of the weights equal those with two, bit for bit."""

import pytest

from tests.metrics_page import unknown
from verl.utils.observe.record import read_entries

from . import shapes, test_vision
from .conftest import assert_bit_for_bit
from .test_async_rollout import ASYNC, SHORT, phases_of, short_turns

pytestmark = pytest.mark.full

ONE_COPY = {"actor_rollout_ref.rollout.share_weights": True}
MODEL = "actor_rollout_ref.actor.fsdp_config"
BF16 = {
    f"{MODEL}.model_dtype": "bf16",
    f"{MODEL}.mixed_precision": "{param_dtype:bf16,reduce_dtype:fp32}",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
}
"""FSDP2 wraps the one worker, which sums gradients in fp32."""
RUNS = {
    "batches": {},
    "strategy fsdp2": {"actor_rollout_ref.actor.strategy": "fsdp2"},
    "gradient checkpointing": {"actor_rollout_ref.model.enable_gradient_checkpointing": True},
    "fused head": {"actor_rollout_ref.model.use_fused_kernels": True},
    "padded": {"actor_rollout_ref.model.use_remove_padding": False},
    "agent loops": ASYNC,
    "bf16": BF16,
    "bf16, agent loops": BF16 | ASYNC,
}


def assert_equal_runs(workspace, name, changes):
    """Run with two copies and with one, and compare all that the records hold."""
    two, one = (workspace.train(f"{name}-{len(more)}", changes | more) for more in ({}, ONE_COPY))
    assert one.steps.keys() == two.steps.keys() and len(one.steps) > 1
    for step in one.steps:
        assert one.numbers(step) == two.numbers(step), f"step {step}"
        numbers = one.steps[step]
        if step:
            assert numbers["weight_sync/bytes"] == 0 < numbers["weight_sync/shared_tensors"]
            assert numbers["weight_sync/shared_tensors"] == two.steps[step]["weight_sync/tensors"]
            assert "weight_sync/checksum_ok" not in numbers and not unknown(set(numbers))
    digests = [
        [phases_of(entry) for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in (two, one)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", RUNS)
def test_text(workspace, kind):
    changes = SHORT | {"trainer.total_training_steps": 3} | RUNS[kind]
    assert_equal_runs(workspace, f"one-copy-{kind.replace(' ', '-').replace(',', '')}", changes)


def test_turns_tools_and_segments(workspace, tmp_path):
    assert_equal_runs(workspace, "one-copy-turns", short_turns(tmp_path))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_vision_models_with_their_towers(workspace, tmp_path, kind):
    """The tower learns too, and its merged projections are the engine's."""
    shapes.write(tmp_path, train=32, test=4, supervised=4)
    model = test_vision.tiny(tmp_path, kind)
    changes = test_vision.overrides(tmp_path, model, steps=2, prompts=4, samples=2) | test_vision.LETTERS
    changes |= {"trainer.record_digests": True, "trainer.n_gpus_per_node": 1, "trainer.val_before_train": False}
    changes |= {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8}
    assert_equal_runs(workspace, f"one-copy-{kind}", changes)


@pytest.mark.parametrize("mode", ["batches", "agent loops"])
@pytest.mark.parametrize("point", ["weight_sync", "update_actor", "generate"])
def test_a_run_that_is_killed_resumes_bit_for_bit(workspace, tmp_path, mode, point):
    changes = SHORT | {"trainer.total_training_steps": 3, "trainer.save_freq": 1} | RUNS[mode] | ONE_COPY
    name = f"one-copy-{mode.replace(' ', '-')}-{point}"
    whole = workspace.train(f"{name}-whole", changes)
    fault = {"VERL_FAULT": f"kill:{point}:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train(name, changes, env=fault, fails=True)
    assert (tmp_path / "fault").exists() and sorted(killed.steps) == [1, 2]
    assert_bit_for_bit(workspace.train(name, changes), whole, (1, 2, 3))


def test_a_run_goes_on_with_one_copy_and_with_two(workspace):
    """A checkpoint does not tell which run has written it."""
    changes = SHORT | {"trainer.total_training_steps": 3, "trainer.save_freq": 1}
    whole = workspace.train("copies-whole", changes)
    for name, first, then in (("one-first", ONE_COPY, {}), ("two-first", {}, ONE_COPY)):
        workspace.train(name, changes | first | {"trainer.total_training_steps": 2})
        assert_bit_for_bit(workspace.train(name, changes | then), whole, (1, 2, 3))
