"""Rollout importance sampling in whole runs: what the metrics say of an engine that differs from the model.

Where both are in fp32 they agree: ``test_train.py`` holds its PPO run to that.
"""

import math

import pytest

from verl.utils.observe.record import read_entries
from verl.utils.report.flags import find_flags

STALE = 2
MISMATCH, WEIGHT = "mismatch/mismatch_", "mismatch/rollout_is_"


@pytest.mark.full  # sharding_manager/test_megatron_vllm.py leaves a sync out, report/test_flags.py flags old weights
def test_an_engine_in_bf16_and_a_sync_left_out_are_seen(workspace, tmp_path):
    """The engine rounds to bf16 in all steps, and samples one of them with the weights from before the last update."""
    fault = {"VERL_FAULT": f"skip:weight_sync:step={STALE}", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    weighted = {"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is": True, "trainer.test_freq": -1}
    coarse = {"actor_rollout_ref.rollout.dtype": "bfloat16", "trainer.total_training_steps": 3}
    run = workspace.train("rollout-is", weighted | coarse, env=fault)
    assert f"weight_sync rank=0 step={STALE}" in (tmp_path / "fault").read_text()
    assert sorted(run.steps) == [1, 2, 3]
    assert all(math.isfinite(value) for numbers in run.steps.values() for value in numbers.values())
    current = [run.steps[step] for step in (1, 3)]
    for numbers in current:
        assert 1e-7 < numbers[MISMATCH + "k3_kl"] < 1e-4
        assert 1e-4 < numbers[WEIGHT + "std"] < 0.02
        assert 1e-4 < numbers["training/rollout_log_prob_diff_max"] < 0.1
        assert numbers[WEIGHT + "p25"] < 1 < numbers[WEIGHT + "p75"]
        assert abs(numbers[WEIGHT + "mean"] - 1) < 1e-2
        assert numbers[WEIGHT + "eff_sample_size"] > 0.999
        assert numbers[WEIGHT + "ratio_fraction_high"] == numbers[WEIGHT + "veto_fraction"] == 0
    stale = run.steps[STALE]
    assert stale[MISMATCH + "k3_kl"] > 100 * max(numbers[MISMATCH + "k3_kl"] for numbers in current)
    assert stale[WEIGHT + "std"] > 10 * max(numbers[WEIGHT + "std"] for numbers in current)
    assert stale[WEIGHT + "eff_sample_size"] < 0.99
    flags = {flag.name: flag.step for flag in find_flags(read_entries(run.folder / "metrics.jsonl"))}
    flags.pop("truncated responses", None)  # the model has not learned to end
    assert flags == {"stale weights": STALE}
