"""Responses of a group that end one by one: a run that goes on keeps those that are there."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.asynchronous.driver import (
    GROUPS,
    SAMPLES,
    STEPS,
    collect,
    end,
    make_trainer,
    numbers,
    resumed,
)
from tests.trainer.asynchronous.driver import quick_looks as quick_looks
from tests.trainer.asynchronous.test_turns import kept_of
from verl.errors import WrongInput
from verl.experimental.agent_loop.held import KeptTokens
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.asynchronous.ledger import LedgerReader

AHEAD = {"staleness_threshold": 3.0, "max_off_policy_threshold": 3}


def finished_of(path: Path) -> dict[tuple[int, int], int]:
    """Return the events of the finished responses, by prompt and place."""
    with LedgerReader(path) as reader:
        return {(event.facts["number"], event.facts["sample"]): event.seq for event in reader.events("finished")}


def sent_by(trainer: Any) -> list[tuple[str, int]]:
    """Collect the prompts and places of all requests that a trainer sends."""
    sent = []
    send = trainer.async_rollout_manager.send

    def noting(requests: DataProto) -> PendingGeneration:
        assert len(requests) == 1
        sent.append((str(requests.non_tensor_batch["uid"][0]), int(requests.batch["sample"][0])))
        return send(requests)

    trainer.async_rollout_manager.send = noting
    return sent


def finish_one(trainer: Any, path: Path) -> None:
    """Finish one response of a group whose other one is under way."""
    loops = trainer.async_rollout_manager
    uids = [entry[0].prompts.non_tensor_batch["uid"][0] for entry in loops.waiting]
    at = next(at for at, uid in enumerate(uids) if uids.count(uid) == SAMPLES)
    pending, future, number = loops.waiting.pop(at)
    known = len(finished_of(path))
    loops.ended[id(pending)] = number
    future.set_result(None)
    while len(finished_of(path)) == known:
        time.sleep(0.01)


@pytest.mark.parametrize("saved", [0, 2, 3])
def test_finished_siblings_are_not_sampled_again(tmp_path: Path, saved: int) -> None:
    """Saved: no checkpoint, one before the response ended, and one that holds it."""
    first = make_trainer(tmp_path, 4, **AHEAD)
    before = collect(first, 3, saves=[saved] if saved < 3 else [])
    path = tmp_path / "ledger.sqlite"
    finish_one(first, path)
    if saved == 3:
        first._save_checkpoint()
    end(first)
    kept = finished_of(path)
    whole = {number for number, _ in kept if sum(each == number for each, _ in kept) == SAMPLES}
    siblings = [key for key in kept if key[0] not in whole]
    assert siblings
    with LedgerReader(path) as reader:
        uids = {event.facts["number"]: event.facts["uid"] for event in reader.events("drawn")}
        under_way = sum(len(event.facts["seeds"]) for event in reader.events("sent")) - len(kept)
    position = first.checkpoints.saved[saved][0] if saved else None
    weights = weights_of(path)
    second = resumed(tmp_path, saved, position, weights[saved - 1] if saved else "0", changed=changes())
    sent = sent_by(second)
    after = collect(second, STEPS)
    again = {(uids[number], place) for number, place in kept} & set(sent)
    assert not again
    lineage = numbers({step: before[step] for step in range(1, saved + 1)}) + numbers(after)
    assert sorted(lineage) == list(range(STEPS * GROUPS))
    assert len(finished_of(path)) == STEPS * GROUPS * SAMPLES
    with LedgerReader(path) as reader:
        facts = next(reader.events("resumed")).facts
    assert facts["responses"] >= (saved < 3) and facts["restarted"] == under_way
    assert after[STEPS][2]["fully_async/count/restarted_samples"] == under_way
    taken = {group.number: group for _, groups, _ in after.values() for group in groups}
    for number, place in siblings:
        seeds = taken[number].seeds
        assert torch.equal(taken[number].output.batch["responses"][place], (seeds[place : place + 1] % 97) + 3)


def weights_of(path: Path) -> dict[int, str]:
    with LedgerReader(path) as reader:
        return {event.facts["update"]: event.facts["weights"][0] for event in reader.events("update")}


def changes() -> dict[str, Any]:
    return {f"async_training.{key}": value for key, value in AHEAD.items()}


def test_a_sibling_of_a_group_of_another_size_is_refused(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, 1, **AHEAD)
    collect(first, 3)
    end(first)
    other = changes() | {"actor_rollout_ref.rollout.n": SAMPLES + 1}
    second = resumed(tmp_path, 0, None, changed=other)
    with pytest.raises(WrongInput, match=r"has 2 kept responses, and the run asks for 3: restore"):
        collect(second, STEPS)
    end(second)


@pytest.mark.parametrize("partial", [True, False])
def test_a_publication_records_the_tokens_of_unfinished_responses(tmp_path: Path, partial: bool) -> None:
    """It interrupts them while the servers get new weights, and not for weights that they have."""
    trainer = make_trainer(tmp_path, 4, partial_rollout=partial, **AHEAD)
    loops = trainer.async_rollout_manager
    interrupted = []
    sync = loops.sync_weights

    def interrupt() -> list[KeptTokens]:
        loops.is_held = True
        interrupted.append([kept_of(pending.prompts, number) for pending, _, number in loops.waiting])
        return interrupted[-1]

    def sync_held(step: int) -> None:
        assert loops.is_held == (partial and loops.number != loops.trained())
        sync(step)

    loops.interrupt, loops.sync_weights = interrupt, sync_held
    collect(trainer, 3)
    assert not loops.is_held
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        turns = [event.facts for event in reader.events("turn")]
    assert len(turns) == sum(map(len, interrupted)) and bool(turns) == partial
    count = len(interrupted)
    if partial:
        trainer._publish({})
        trainer._publish({})
        assert len(interrupted) == count + 1
    end(trainer)
