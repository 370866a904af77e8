"""Rare moments at which a run is saved, killed or ends, and what the run that goes on makes of them."""

import asyncio
import json
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.trainer.asynchronous.driver import (
    GROUPS,
    STEPS,
    collect,
    end,
    make_trainer,
    numbers,
    resumed,
)
from tests.trainer.asynchronous.driver import quick_looks as quick_looks
from tests.trainer.asynchronous.test_turns import turning
from verl.experimental.agent_loop.held import Hold, KeptTokens, Parts
from verl.experimental.agent_loop.manager import AgentLoopManager, joined_answers
from verl.protocol import DataProto
from verl.trainer.asynchronous.history import History, packed, unpacked
from verl.trainer.asynchronous.ledger import Ledger, LedgerReader
from verl.trainer.asynchronous.pacing import Pace, Waiting
from verl.trainer.asynchronous.scheduler import Group, Scheduler
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.loaders import EndOfDataError
from verl.utils.py_functional import object_array
from verl.workers.rewards.scoring import FAILURE_COLUMN, Reason, given_scores
from verl.workers.rollout.server import ABORTED, GenerationRequest, TokenOutput


def test_a_group_that_fails_during_a_checkpoint_is_not_trained_after_a_resume(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, seed=4)
    before = collect(first, 2)
    failing = first.scheduler.outstanding[-1]
    first.async_rollout_manager.fails.add(failing.prepared.non_tensor_batch["uid"][0])
    failed = first.record.failed

    def saving(group: Any, reason: str) -> None:
        if not first.checkpoints.saved:  # between the end of the group and its removal from those under way
            first._save_checkpoint()
        failed(group, reason)

    first.record.failed = saving
    loops = first.async_rollout_manager
    while not first.checkpoints.saved:
        if loops.waiting:
            loops.finish_some()
    end(first)
    second = resumed(tmp_path, 2, first.checkpoints.saved[2][0])
    after = collect(second, STEPS)
    lineage = numbers(before) + numbers(after)
    assert failing.number not in lineage
    assert len(lineage) == len(set(lineage)) == STEPS * GROUPS
    assert after[STEPS][2]["fully_async/count/failed_samples"] == 1


def test_repeated_updates_have_their_recorded_scores_also_for_groups_of_the_checkpoint(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, seed=4)
    record_scores(first)
    collect(first, 2)
    while not any(group.output is not None for group in first.scheduler.outstanding):
        first.async_rollout_manager.finish_some()
    finished = {group.number for group in first.scheduler.outstanding if group.output is not None}
    first._save_checkpoint()
    collect(first, 5)
    end(first)
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        recorded = {event.facts["number"]: event.facts["scores"] for event in reader.events("scored")}
    second = resumed(tmp_path, 2, first.checkpoints.saved[2][0], "2")
    after = collect(second, 5)
    end(second)
    assert finished & set(numbers(after))
    for step in (3, 4, 5):
        for group in after[step][1]:
            assert group.output.batch["rm_scores"].sum(-1).tolist() == recorded[group.number]
        whole = joined_answers([group.output.select() for group in after[step][1]])
        failures = given_scores(whole, True)["reward_extra_info"][FAILURE_COLUMN]
        assert failures == ["unavailable", *[None] * (len(failures) - 1)]  # which is not trained


def record_scores(trainer: Any) -> None:
    """Record scores with each update."""
    updated = trainer.record.updated

    def scored(update: int, weights: Any, number: int) -> None:
        groups = trainer._taken
        rows = sum(len(group.requests) for group in groups)
        trainer.record.scored(groups, torch.rand(rows, 1), ["unavailable", *[None] * (rows - 1)])
        updated(update, weights, number)

    trainer.record.updated = scored


def test_recorded_batches_are_repeated_also_after_a_checkpoint_among_them(tmp_path: Path) -> None:
    free = {"max_off_policy_threshold": None, "staleness_threshold": 3.0}
    changed = {f"async_training.{key}": value for key, value in free.items()}
    first = make_trainer(tmp_path, seed=4, **free)
    before = collect(first, 5)
    end(first)
    second = resumed(tmp_path, 0, None, changed=changed)
    collect(second, 2, saves=[2])
    end(second)
    third = resumed(tmp_path, 2, second.checkpoints.saved[2][0], "2", changed=changed)
    after = collect(third, 5)
    end(third)
    assert {step: numbers({step: after[step]}) for step in (3, 4, 5)} == {
        step: numbers({step: before[step]}) for step in (3, 4, 5)
    }


def test_a_ledger_that_ends_before_the_checkpoint_is_completed_by_its_segment(tmp_path: Path) -> None:
    """As after a loss of power, which may take the last events of the ledger."""
    first = make_trainer(tmp_path, seed=4)
    before = collect(first, 2, saves=[1])
    older = tmp_path / "older.sqlite"
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        reader.export(older, 0, reader.last_seq)
    before |= collect(first, 4, saves=[4])
    end(first)
    shutil.copy(older, tmp_path / "ledger.sqlite")
    position = first.checkpoints.saved[4][0]
    second = resumed(tmp_path, 4, position, "4")
    collect(second, 5)
    end(second)
    third = resumed(tmp_path, 4, position, "4")
    assert sorted(third.record.history.batches) == [4]
    after = collect(third, STEPS)
    lineage = numbers({step: before[step] for step in (1, 2, 3, 4)}) + numbers(after)
    assert sorted(lineage) == list(range(STEPS * GROUPS))


@pytest.mark.parametrize("partial", [True, False])
def test_engines_do_not_serve_after_the_end_of_the_data(tmp_path: Path, partial: bool) -> None:
    """Validation and checkpoint, which follow, need their devices."""
    trainer, loops = turning(tmp_path, 0, partial_rollout=partial)
    OmegaConf.update(trainer.config, "trainer", {"total_training_steps": None, "total_epochs": 1})
    trainer.run_config = RunConfig.parse(trainer.config)
    with pytest.raises(EndOfDataError):
        collect(trainer, STEPS)
    assert not loops.is_awake
    end(trainer)


def test_the_recorded_scores_are_those_of_the_groups_where_rows_are_drawn_by_score(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    algorithm = {"adv_estimator": "gae", "use_pf_ppo": True, "pf_ppo": {"reweight_method": "max_min"}}
    OmegaConf.update(trainer.config, "algorithm", algorithm)
    trainer.run_config = RunConfig.parse(trainer.config)
    ((batch, taken, _),) = collect(trainer, 1).values()
    scores = torch.arange(len(batch))[:, None] + 1.0
    batch.batch["values"] = torch.zeros(len(batch), 1)
    trainer._add_scores = lambda batch, metrics: batch.batch.update({"token_level_scores": scores})
    trainer.shape(batch, {}, {})
    end(trainer)
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        recorded = {event.facts["number"]: event.facts["scores"] for event in reader.events("scored")}
    assert [score for group in taken for score in recorded[group.number]] == scores[:, 0].tolist()


def test_a_response_that_could_not_be_scored_is_restored() -> None:
    failures = object_array([Reason("raised", "ValueError: no number")])
    response = DataProto.from_dict({"responses": torch.ones(1, 2)}, {FAILURE_COLUMN: failures})
    (found,) = unpacked(packed(response), "event 3", ()).non_tensor_batch[FAILURE_COLUMN]
    assert (found, found.text) == ("raised", "ValueError: no number")


def test_tokens_that_are_kept_count_for_the_age_of_their_group(tmp_path: Path) -> None:
    """Tokens of a version that the ledger does not know are sampled again."""
    trainer = make_trainer(tmp_path)
    ((_, (group, _), _),) = collect(trainer, 1).values()
    end(trainer)
    with Ledger(tmp_path / "other.sqlite") as ledger:
        for version, number in ((3, 13), (4, 14)):
            ledger.append("published", {"version": version, "number": number})
        for sample, numbers_of in ((0, [13, 14]), (1, [12, 13])):
            kept = KeptTokens("uid", sample, [1], [2, 3], None, [(number, 1) for number in numbers_of])
            ledger.append("turn", {"number": 0, "sample": sample}, json.dumps(asdict(kept)).encode())
        sent = Group(0, group.prepared, group.row, group.prompt, group.requests, group.seeds)
        History.read(ledger, 0, ()).restore(sent)
    assert (list(sent.kept), sent.spans, sent.planned) == ([0], {0: (3, 4)}, 13)
    scheduler = Scheduler(trainer.pace, lambda group: {}, lambda group, place: None, lambda group: None, 9, version=4)
    scheduler.add([sent])
    scheduler.stop()
    assert sent.version == 3


def test_kept_tokens_are_json_whatever_numbers_a_loop_gives() -> None:
    hold = Hold()
    parts = Parts(GenerationRequest(np.array([5, 6]), {}, "0"), [TokenOutput([7], None, ABORTED, [(1, 1)])])
    hold.keep("uid", 0, parts)
    (kept,) = asyncio.run(hold.begin())
    assert json.loads(json.dumps(asdict(kept)))["prompt_ids"] == [5, 6]


def test_no_update_takes_groups_that_are_already_too_old() -> None:
    pace = Pace(groups=2, updates=1, ahead=1.0, bound=1)
    finished = [Waiting(0, 3), Waiting(1, 5)]
    assert pace.choose(4, finished, in_flight=[]) == finished
    assert pace.choose(5, finished, in_flight=[]) is None


def test_servers_are_looked_after_however_many_responses_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.trainer.asynchronous.scheduler._LOOK_S", 0.1)
    group: Any = SimpleNamespace(number=0)
    scheduler = Scheduler(Pace(1, 1, 0.0), lambda group: {}, lambda group, place: None, lambda group: None, 1)
    scheduler._in_flight[0] = group
    looks: list[int] = []

    def look() -> None:
        looks.append(changes)
        scheduler._in_flight.clear()

    changes = 0
    waiting = threading.Thread(target=scheduler.drain, args=(look,))
    waiting.start()
    while waiting.is_alive() and changes < 2000:
        with scheduler._changed:
            scheduler._changed.notify_all()
        changes += 1
        time.sleep(0.001)
    waiting.join()
    assert looks[0] < 2000


def test_an_agent_loop_worker_takes_more_calls_than_a_step_has_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentLoopManager, "_init_replicas", lambda self: None)
    monkeypatch.setattr(AgentLoopManager, "_init_agent_loop_workers", lambda self: None)
    rollout = {"_target_": "verl.workers.config.RolloutConfig", "name": "vllm", "mode": "async"}
    config = OmegaConf.create({"actor_rollout_ref": {"hybrid_engine": True, "rollout": rollout}})
    manager = AgentLoopManager(config, SimpleNamespace())
    assert manager.agent_loop_workers_class._default_options["max_concurrency"] > 50_000


def test_weights_that_no_server_gets_are_not_recorded_as_published(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, trigger_parameter_sync_step=2)
    collect(trainer, 1)
    trainer._look_after_servers()  # all of which live
    end(trainer)
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert [event.facts["number"] for event in reader.events("published")] == [10]
