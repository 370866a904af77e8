"""Every feature of training runs ``main_ppo`` and gives the numbers of a run without it.

Tolerances: in fp32, sums of some hundred terms in another order differ by about 1e-6 relative. An update passes such a
difference on, magnified where AdamW divides by a small second moment, so the steps that follow may differ by more.
"""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from . import features
from .features import ACTOR, ALL_AT_ONCE, CRITIC, FEATURES, SHARING, STEPS
from .verification import record

FIRST_STEP, LATER_STEPS, GAP = 1e-5, 5e-4, 1e-4
LORA_STEPS = 4
LORA = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    f"{CRITIC}.model.lora_rank": 8,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-2,
    "trainer.total_training_steps": LORA_STEPS,
}


def train(workspace, label, changes):
    name = re.sub(r"\W+", "-", label)
    return workspace.train(name, features.base(workspace, name) | changes)


@pytest.fixture(scope="module")
def base(workspace, verification_page):
    run = train(workspace, "base", {})
    record(verification_page, "## Features", ["base: one worker", "", "", "", f"{features.gap_of(run):.1e}"])
    return run


@pytest.fixture(scope="module")
def lora(workspace):
    return train(workspace, "lora", LORA | features.workers(2) | {"trainer.save_freq": 2})


def test_the_base_moves_log_probs_and_the_engine_follows(base):
    """A clipped ratio means that one update moved the log-probability of a token by more than 0.18."""
    for step in range(1, STEPS + 1):
        numbers = base.steps[step]
        assert numbers["actor/pg_clipfrac"] > 0
        assert numbers[features.GAP] < GAP
        assert numbers["actor/kl_loss"] > 0


@pytest.mark.parametrize(
    "name", [name if name == ALL_AT_ONCE else pytest.param(name, marks=pytest.mark.full) for name in FEATURES]
)
def test_a_feature_changes_no_number(workspace, base, verification_page, name):
    run = train(workspace, name, FEATURES[name])
    if SHARING.items() <= FEATURES[name].items():
        check_computed(run)
    found = features.difference(base, run)
    shown = [f"{value:.1e} ({metric})" if value else "none" for value, metric in (found.first_step, found.later_steps)]
    record(verification_page, "## Features", [name, f"{found.same_responses:.1%}", *shown, f"{found.gap:.1e}"])
    assert found.same_responses == 1.0
    assert found.first_step[0] < FIRST_STEP
    assert found.later_steps[0] < LATER_STEPS
    assert found.gap < GAP


def check_computed(run):
    """Every pass of the trainer computes fewer tokens than the batch has, and not so few that rows were left out."""
    for numbers in run.steps.values():
        begins = "perf/computed_tokens/"
        computed = {name.removeprefix(begins): tokens for name, tokens in numbers.items() if name.startswith(begins)}
        assert computed.keys() == {"actor_infer", "ref", "critic_infer", "critic", "actor"}
        for phase, tokens in computed.items():
            assert 0.25 < tokens / numbers["perf/total_num_tokens"] < 0.9, phase


@pytest.mark.full  # sharding_manager/test_shared_weights.py trains and samples with one copy
def test_one_copy_of_the_weights_changes_no_bit(workspace, base):
    """Trainer and engine share their weights: every number of training and generation is that of two copies."""
    run = train(workspace, "shared weights", {"actor_rollout_ref.rollout.share_weights": True})
    for step in range(1, STEPS + 1):
        assert features.responses(run, step) == features.responses(base, step)
        assert run.numbers(step) == base.numbers(step), f"step {step}"
        moved, copied = run.steps[step], base.steps[step]
        assert moved["weight_sync/bytes"] == 0 and moved["weight_sync/shared_tensors"] == copied["weight_sync/tensors"]
        assert 0 < moved["weight_sync/probe_gap"] < GAP


@pytest.mark.full
def test_a_change_of_the_loss_is_seen(workspace, base):
    """The comparison above can fail: a tenth more of the entropy bonus is found in the first step."""
    found = features.difference(base, train(workspace, "control", {f"{ACTOR}.entropy_coeff": 0.011}))
    assert found.first_step[0] > 5 * FIRST_STEP


@pytest.mark.full
def test_penalties_without_weight_are_no_penalties(workspace):
    """A separate reference worker and a KL term that counts for nothing leave the numbers as they are."""
    without = train(workspace, "plain", {f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.entropy_coeff": 0})
    weightless = train(workspace, "weightless", {f"{ACTOR}.kl_loss_coef": 0, f"{ACTOR}.entropy_coeff": 0})
    for step in range(1, STEPS + 1):
        assert features.responses(weightless, step) == features.responses(without, step)
        extra = {"actor/kl_loss", "actor/kl_coef"}
        numbers = {k: v for k, v in features.compared(weightless, step).items() if k not in extra}
        assert features.largest(features.compared(without, step), numbers)[0] < FIRST_STEP


def test_adapters_start_at_the_base_model_and_reach_the_engine(lora, verification_page):
    """The base model is the reference: no KL before the first update, and a mean of 5e-5 is a change above 1e-2."""
    assert abs(lora.steps[1]["actor/kl_loss"]) < 1e-9
    assert lora.steps[LORA_STEPS]["actor/kl_loss"] > 5e-5
    gap = features.gap_of(lora)
    first, last = (f"{lora.steps[step]['actor/kl_loss']:.1e}" for step in (1, LORA_STEPS))
    record(verification_page, "## Adapters", ["two workers, rank 8", first, last, f"{gap:.1e}"])
    assert gap < GAP


@pytest.mark.full  # engine/test_fsdp_engine.py continues adapters, test_train.py a run
def test_adapters_resume_bit_for_bit(workspace, lora):
    resumed = train(
        workspace,
        "lora-resumed",
        LORA
        | features.workers(2)
        | {
            "trainer.save_freq": 2,
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": lora.folder / "global_step_2",
        },
    )
    assert sorted(resumed.steps) == [3, 4]
    for step in (3, 4):
        assert resumed.numbers(step) == lora.numbers(step)
        assert features.responses(resumed, step) == features.responses(lora, step)
    first, second = (load_file(adapter_file(run.folder, LORA_STEPS)) for run in (lora, resumed))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    before = load_file(adapter_file(lora.folder, 2))
    assert any(not first[name].equal(before[name]) for name in first)


def adapter_file(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}/actor/lora_adapter/adapter_model.safetensors"


@pytest.mark.full
@pytest.mark.parametrize(("count", "label"), [(1, "one worker"), (2, "two workers")])
def test_generation_by_transformers(workspace, verification_page, count, label):
    """It samples other tokens than vLLM; the trainer recomputes their log-probabilities."""
    label += ", rollout by transformers"
    run = train(workspace, label, features.workers(count) | {"actor_rollout_ref.rollout.name": "hf"})
    record(verification_page, "## Features", [label, "other sampler", "", "", f"{features.gap_of(run):.1e}"])
    assert all(run.steps[step]["actor/pg_clipfrac"] > 0 for step in range(1, STEPS + 1))
    assert features.gap_of(run) < GAP


@pytest.mark.full
@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_alike_on_every_layout(workspace, loss):
    """Two passes over each batch: the second selects by log-probabilities that the update has moved."""
    options = {"loss_mode": loss, "clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 1e3, "kl_cov_ratio": 0.1}
    changes = {f"{ACTOR}.policy_loss.{name}": value for name, value in options.items()}
    one = train(workspace, loss, changes)
    found = features.difference(one, train(workspace, f"{loss}, all at once", changes | FEATURES[ALL_AT_ONCE]))
    assert found.same_responses == 1.0
    assert found.first_step[0] < FIRST_STEP
    assert found.later_steps[0] < LATER_STEPS
    if loss == "clip_cov":
        assert all(0.05 < one.steps[step]["actor/pg_clipfrac"] < 0.11 for step in range(1, STEPS + 1))
    else:
        assert one.steps[STEPS]["actor/ppo_kl"] > 0


@pytest.mark.full
@pytest.mark.parametrize("adapters", [False, True])
def test_the_full_kl_is_alike_on_every_layout(workspace, adapters):
    """The workers of the actor hold the reference, or are it without their adapters; no pass of its own is made."""
    name = f"full KL, {'adapters' if adapters else 'a model'}"
    changes = (LORA if adapters else {}) | {f"{ACTOR}.kl_loss_type": "full", "trainer.total_training_steps": STEPS}
    one = train(workspace, name, changes)
    other = train(workspace, f"{name}, all at once", changes | FEATURES[ALL_AT_ONCE])
    assert one.steps[STEPS]["actor/kl_loss"] > 1e-6
    assert "timing_s/ref" not in one.steps[STEPS]
    found = features.difference(one, other)
    assert found.same_responses == 1.0
    assert found.first_step[0] < FIRST_STEP
    assert found.later_steps[0] < LATER_STEPS
