"""Asynchronous training on the devices of the trainer: its interrupted responses, kill and resume, and replays."""

import pytest

from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.ledger import LedgerReader

from .features import gap_of

ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 6
COLOCATE = {
    "async_training.mode": "colocate_async",
    "async_training.staleness_threshold": 1.0,
    "async_training.max_off_policy_threshold": 1,
    "data.max_response_length": 48,
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.max_num_seqs": 16,  # a later group begins when an earlier one has ended
    f"{ROLLOUT}.agent.num_workers": 2,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": 3,
    "trainer.save_freq": 2,
}


def train(workspace, name, overrides=None, **options):
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, COLOCATE | (overrides or {}), env=env, **options)


def audited(run):
    """Check the ledger of a run that has ended, and return its audit."""
    reader = LedgerReader(run.folder / "ledger.sqlite")
    reader.verify()
    audit = Audit.of(reader.events())
    assert audit.is_exact and sorted(audit.updates) == list(range(STEPS)), audit.lines()
    assert max(audit.ages) <= 1
    return audit


def assert_replays(workspace, name, run, overrides=None):
    """A replay ends by itself where weights differ; it starts no engine."""
    follows = {"async_training.replay": run.folder / "ledger.sqlite", "trainer.save_freq": -1}
    replay = train(workspace, f"{name}_replay", (overrides or {}) | follows)
    assert len(replay.steps) == STEPS
    assert not any("wake_and_sync" in key for numbers in replay.steps.values() for key in numbers)


def num_partial(run):
    """Return how many trained responses were sampled by two versions."""
    return sum(numbers["fully_async/partial/total_partial_num"] for numbers in run.steps.values())


def test_a_killed_run_with_interrupted_responses_goes_on_and_is_replayed(workspace, tmp_path):
    fault = {"VERL_FAULT": "kill:update_actor:rank=0:step=4", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, "colocate_killed", env=fault, fails=True)
    before = LedgerReader(killed.folder / "ledger.sqlite")
    batches = {event.facts["update"]: event.facts["numbers"] for event in before.events("batch")}
    run = train(workspace, "colocate_killed")
    audit = audited(run)
    assert {update: audit.updates[update] for update in batches} == batches
    resumed = next(iter(LedgerReader(run.folder / "ledger.sqlite").events("resumed"))).facts
    assert resumed["step"] == 2 and resumed["updates"] == [2, 3]
    assert resumed["continued"] > 0  # responses that the update had interrupted
    assert num_partial(run) > 0
    for step, numbers in run.steps.items():
        assert numbers["fully_async/count/current_param_version"] == step - 1
        assert numbers["actor/grad_norm"] > 0
    assert gap_of(run) > 1e-3  # tokens of older weights
    assert_replays(workspace, "colocate_killed", run)


VARIANTS = {
    "vllm": {},
    "sglang": {f"{ROLLOUT}.name": "sglang"},
    "shared_weights": {f"{ROLLOUT}.share_weights": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_joined_responses_have_the_trainers_log_probs_where_no_update_lies_between(workspace, name):
    still = VARIANTS[name] | {"actor_rollout_ref.actor.optim.lr": 0.0}
    run = train(workspace, f"colocate_still_{name}", still)
    audited(run)
    assert num_partial(run) > 0 and gap_of(run) < 1e-4


@pytest.mark.full
def test_whole_responses_are_waited_for(workspace):
    run = train(workspace, "colocate_whole", {"async_training.partial_rollout": False})
    audited(run)
    assert num_partial(run) == 0
