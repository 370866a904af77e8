"""Runs of the quick start that are made to fail in each way that the report flags, and one that is not."""

import html
from pathlib import Path

import pytest

from verl.utils.observe.record import read_entries
from verl.utils.report.flags import find_flags

from .conftest import REPOSITORY, call
from .verification import record

pytestmark = pytest.mark.full

HERE = REPOSITORY / "tests/special_e2e"
REWARDS = f"custom_reward_function.path={HERE / 'flagged_runs.py'}"
PLUGIN = "actor_rollout_ref.model.external_lib=flagged_runs"
LR, STEPS, LOSS = (
    "actor_rollout_ref.actor.optim.lr",
    "trainer.total_training_steps",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
)
RUNS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "none": ("none", [f"{STEPS}=20"], {}),
    "reward collapse": ("a learning rate of 2e-2", [f"{STEPS}=12", f"{LR}=2e-2"], {}),
    "entropy collapse": (
        "starts from the base model; a 7 gives half a score",
        [f"{STEPS}=40", f"{LR}=2e-3", REWARDS, "custom_reward_function.name=sevens"],
        {"MODEL_PATH": "base"},
    ),
    "stale weights": (
        "the weight sync of step 7 is skipped",
        [f"{STEPS}=12"],
        {"VERL_FAULT": "skip:weight_sync:step=7"},
    ),
    "stale weights, agent loops": (
        "the same with agent loops, whose servers say which weights sampled",
        [f"{STEPS}=12", "actor_rollout_ref.rollout.mode=async"],
        {"VERL_FAULT": "skip:weight_sync:step=7"},
    ),
    "rollout mismatch": (
        "the weight sync of step 7 loads older weights",
        [f"{STEPS}=12", "actor_rollout_ref.model.external_lib=lying_sync"],
        {},
    ),
    "length explosion": (
        "a score for length",
        [
            f"{STEPS}=16",
            f"{LR}=5e-4",
            "data.max_response_length=96",
            REWARDS,
            "custom_reward_function.name=as_long_as_possible",
        ],
        {},
    ),
    "straggler": (
        "two workers; the second sleeps half a second in each generation",
        [f"{STEPS}=10"],
        {"WORKERS": "2", "VERL_FAULT": "slow:generate:rank=1"},
    ),
    "memory growth": (
        "a policy loss that keeps 32 MiB of each micro-batch",
        [f"{STEPS}=14", PLUGIN, f"{LOSS}=leaky"],
        {},
    ),
    "not finite": ("a policy loss that is NaN once", [f"{STEPS}=8", PLUGIN, f"{LOSS}=not_finite"], {}),
    "failed scores": (
        "a reward function that raises for every seventh prompt",
        [f"{STEPS}=8", REWARDS, "custom_reward_function.name=fails_for_some"],
        {},
    ),
}
"""Flag, and the kind of run -> what is done to it, overrides, environment."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_flagged_for_what_was_done_to_it(warmed_up, verification_page, tmp_path, name):
    """The report of a run names its fault; that of an untouched run names none."""
    what, overrides, environment = RUNS[name]
    given: dict[str, str | Path] = {
        **warmed_up,
        "OUT_DIR": tmp_path,
        "PYTHONPATH": f"{REPOSITORY}:{HERE}",
        **environment,
    }
    if given["MODEL_PATH"] == "base":
        given["MODEL_PATH"] = tmp_path / "base"
        call(["python3", "examples/tiny_model.py", "--save-dir", str(tmp_path / "base"), "--seed", "1"])
    common = ["trainer.save_freq=-1", "trainer.test_freq=10"]
    call(["bash", "examples/grpo_trainer/run_tiny_cpu.sh", *common, *overrides], **given)
    flags = find_flags(read_entries(tmp_path / "metrics.jsonl"))
    found = {flag.name for flag in flags}
    if name == "none":
        assert not flags
        shown = ["", ""]
    else:
        expected = name.partition(",")[0]
        assert expected in found
        flag = next(flag for flag in flags if flag.name == expected)
        assert html.escape(flag.reason) in (tmp_path / "report.html").read_text()
        shown = [str(flag.step), flag.reason]
    others = ", ".join(sorted(found - {name.partition(",")[0]}))
    record(verification_page, "## Flags", [name, what, *shown, others])
