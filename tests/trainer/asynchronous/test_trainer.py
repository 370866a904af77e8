"""The asynchronous trainer over loops that answer by the seed of the request, after a delay."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.trainer.asynchronous.driver import (
    GROUPS,
    ROWS,
    SAMPLES,
    STEPS,
    collect,
    end,
    make_trainer,
    numbers,
    resumed,
    rows_of,
)
from tests.trainer.asynchronous.driver import quick_looks as quick_looks
from verl.errors import LedgerError, WrongInput
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.history import packed, unpacked
from verl.trainer.asynchronous.kept import FILE_NAME, load_groups
from verl.trainer.asynchronous.ledger import LedgerReader
from verl.trainer.asynchronous.record import SEGMENT
from verl.trainer.asynchronous.trainer import moved
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
def test_every_prompt_is_trained_once_and_no_token_is_older_than_the_bound(
    tmp_path: Path, updates: int, partial: bool
) -> None:
    for seed in range(3):
        trainer = make_trainer(tmp_path, seed, trigger_parameter_sync_step=updates, partial_rollout=partial)
        found = collect(trainer, STEPS)
        assert sorted(numbers(found)) == list(range(STEPS * GROUPS))
        ages = {metrics["fully_async/versions_behind/max"] for _, _, metrics in found.values()}
        assert ages <= {0.0, 1.0}
        assert found[STEPS][2]["fully_async/count/total_generated_samples"] == STEPS * GROUPS * SAMPLES
        assert found[STEPS][2]["fully_async/count/current_param_version"] == (STEPS - 1) // updates


def test_prompts_seeds_and_responses_do_not_depend_on_delays(tmp_path: Path) -> None:
    free = {"max_off_policy_threshold": None, "staleness_threshold": 3.0}
    runs = [collect(make_trainer(tmp_path, seed, **free), STEPS) for seed in (1, 2, 3)]
    assert len({tuple(numbers(found)) for found in runs}) > 1  # other orders of the groups
    contents = []
    for found in runs:
        groups = {group.number: group for _, taken, _ in found.values() for group in taken}
        contents.append(
            {
                number: (
                    group.prepared.batch["input_ids"].tolist(),
                    group.prepared.non_tensor_batch["uid"].tolist(),
                    group.prepared.non_tensor_batch["extra_info"].tolist(),
                    group.output.batch["responses"].tolist(),
                )
                for number, group in groups.items()
            }
        )
    assert contents[0].keys() & contents[1].keys() & contents[2].keys()
    for number in range(STEPS * GROUPS):
        known = [found[number] for found in contents if number in found]
        assert all(each == known[0] for each in known)
    rows = runs[0][1][0]
    assert rows.non_tensor_batch["uid"].tolist() == [
        uid for uid in rows.non_tensor_batch["uid"][::SAMPLES] for _ in "ab"
    ]


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_trains_what_was_under_way(tmp_path: Path, stop: int) -> None:
    first = make_trainer(tmp_path, seed=4)
    before = collect(first, stop)
    first._save_checkpoint()
    end(first)
    position, names = first.checkpoints.saved[stop]
    assert names == [FILE_NAME, SEGMENT]
    LedgerReader(tmp_path / f"global_step_{stop}" / SEGMENT).verify()
    kept = {group.number: group.output for group in first.scheduler.outstanding if group.output is not None}
    second = resumed(tmp_path, stop, position)
    after = collect(second, STEPS)
    assert sorted(numbers(before) + numbers(after)) == list(range(STEPS * GROUPS))
    taken = {group.number: group.output for _, groups, _ in after.values() for group in groups}
    for number, output in kept.items():
        assert torch.equal(taken[number].batch["responses"], output.batch["responses"])
    assert max(metrics["fully_async/versions_behind/max"] for _, _, metrics in after.values()) <= 1


@pytest.mark.parametrize("saved", [0, 2, 4])
def test_a_killed_run_repeats_its_recorded_updates(
    tmp_path: Path, saved: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends without a checkpoint of its last steps, as after SIGKILL, takes the same groups again."""
    first = make_trainer(tmp_path, seed=4)
    weights = []
    before = collect(first, 5, saves=[saved])
    end(first)
    for event in LedgerReader(tmp_path / "ledger.sqlite").events("update"):
        weights.append(event.facts["weights"][0])
    position = first.checkpoints.saved[saved][0] if saved else None
    second = resumed(tmp_path, saved, position, weights[saved - 1] if saved else "0")
    after = collect(second, STEPS)
    assert {step: numbers({step: after[step]}) for step in range(saved + 1, 6)} == {
        step: numbers({step: before[step]}) for step in range(saved + 1, 6)
    }
    lineage = numbers({step: before[step] for step in range(1, saved + 1)}) + numbers(after)
    assert sorted(lineage) == list(range(STEPS * GROUPS))
    reader = LedgerReader(tmp_path / "ledger.sqlite")
    again = [event.facts for event in reader.events("update")]
    assert [facts["weights"] for facts in again[5 : 10 - saved]] == [[each] for each in weights[saved:]]
    facts = next(reader.events("resumed")).facts
    assert facts["updates"] == list(range(saved, 5)) and facts["step"] == saved
    assert not [line for line in caplog.messages if "other bits" in line]


def test_a_lost_ledger_begins_again_with_the_segment_of_the_checkpoint(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, seed=4)
    before = collect(first, 4, saves=[1, 3])
    end(first)
    (tmp_path / "ledger.sqlite").unlink()
    second = resumed(tmp_path, 3, first.checkpoints.saved[3][0], "3")
    after = collect(second, STEPS)
    lineage = numbers({step: before[step] for step in (1, 2, 3)}) + numbers(after)
    assert sorted(lineage) == list(range(STEPS * GROUPS))
    reader = LedgerReader(tmp_path / "ledger.sqlite")
    reader.verify()
    segment = LedgerReader(tmp_path / "global_step_3" / SEGMENT)
    assert 0 < reader.base_seq == segment.base_seq < segment.last_seq < reader.last_seq
    assert [event.facts["update"] for event in reader.events("batch")] == [1, 2, 3, 4, 5]
    end(second)
    third = resumed(tmp_path, 3, first.checkpoints.saved[3][0], "3")  # killed: updates 3 to 5 are repeated
    assert sorted(third.record.history.batches) == [3, 4, 5]
    end(third)


def test_a_replay_follows_the_ledger_and_finds_other_weights(tmp_path: Path) -> None:
    first = make_trainer(tmp_path / "run", seed=4)
    before = collect(first, STEPS)
    path = tmp_path / "run" / "ledger.sqlite"
    replay = make_trainer(tmp_path / "replay", replay=str(path))
    replay.async_rollout_manager = None  # there are no servers
    after = collect(replay, STEPS)
    assert {step: rows_of(each[0]).tolist() for step, each in after.items()} == {
        step: rows_of(each[0]).tolist() for step, each in before.items()
    }
    assert replay.weights == first.weights
    other = make_trainer(tmp_path / "replay", replay=str(path))
    other.async_rollout_manager, other.weights = None, "other"
    with pytest.raises(RuntimeError, match="departs from its ledger: update 0"):
        collect(other, STEPS)
    longer = make_trainer(tmp_path / "replay", replay=str(path))
    longer.async_rollout_manager, longer.state.total_steps = None, STEPS + 1
    with pytest.raises(loaders.EndOfDataError, match=f"no batch of update {STEPS}"):
        collect(longer, STEPS + 1)


def last_finished(connection: sqlite3.Connection) -> tuple[int, bytes]:
    return connection.execute("SELECT seq, payload FROM events WHERE kind = 'finished' ORDER BY seq DESC").fetchone()


def change_token(connection: sqlite3.Connection) -> int:
    seq, payload = last_finished(connection)
    output = unpacked(payload, "the test", ())
    output.batch["responses"][0, 0] += 1
    connection.execute("UPDATE events SET payload = ? WHERE seq = ?", (packed(output), seq))
    return seq


def change_version(connection: sqlite3.Connection) -> int:
    seq, _ = last_finished(connection)
    change = "json_set(facts, '$.span[0]', json_extract(facts, '$.span[0]') - 1)"
    connection.execute(f"UPDATE events SET facts = {change} WHERE seq = ?", (seq,))
    return seq


def change_order(connection: sqlite3.Connection) -> int:
    query = "SELECT seq, facts FROM events WHERE kind = 'batch' ORDER BY seq DESC"
    (later, of_later), (seq, facts) = connection.execute(query).fetchmany(2)
    swapped = [json.loads(each) for each in (facts, of_later)]
    swapped[0]["numbers"], swapped[1]["numbers"] = swapped[1]["numbers"], swapped[0]["numbers"]
    for place, each in zip((seq, later), swapped, strict=True):
        text = json.dumps(each, sort_keys=True, separators=(",", ":"))
        connection.execute("UPDATE events SET facts = ? WHERE seq = ?", (text, place))
    return seq


@pytest.mark.parametrize("change", [change_token, change_version, change_order])
def test_a_replay_finds_a_changed_event(tmp_path: Path, change: Callable[[sqlite3.Connection], int]) -> None:
    collect(make_trainer(tmp_path / "run"), STEPS)
    path = tmp_path / "run" / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        seq = change(connection)
    with pytest.raises(LedgerError, match=rf"event {seq} \("):
        collect(make_trainer(tmp_path / "replay", replay=str(path)), STEPS)


@pytest.mark.parametrize("change", [change_token, change_version, change_order])
@pytest.mark.parametrize("saved", [0, 1])
def test_a_resumed_run_finds_a_changed_event(
    tmp_path: Path, saved: int, change: Callable[[sqlite3.Connection], int]
) -> None:
    first = make_trainer(tmp_path, seed=4)
    collect(first, 4, saves=[saved])
    end(first)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        seq = change(connection)
    position = first.checkpoints.saved[saved][0] if saved else None
    with pytest.raises(LedgerError, match=rf"event {seq} \("):
        resumed(tmp_path, saved, position, "1" if saved else "0")


def test_responses_to_other_data_are_not_taken(tmp_path: Path) -> None:
    first = make_trainer(tmp_path / "run")
    collect(first, STEPS)
    other = make_trainer(tmp_path / "replay", replay=str(tmp_path / "run" / "ledger.sqlite"))
    other.state.seed, other.async_rollout_manager = 2, None
    with pytest.raises(WrongInput, match=r"another prompt as number .*trainer\.seed"):
        collect(other, STEPS)


def test_a_new_run_puts_the_ledger_of_an_earlier_one_aside(tmp_path: Path) -> None:
    for _ in range(2):
        collect(make_trainer(tmp_path), STEPS)
    found = [LedgerReader(tmp_path / name) for name in ("ledger.sqlite", "ledger_1.sqlite")]
    assert [len(list(each.events("update"))) for each in found] == [STEPS, STEPS]


def test_a_validation_leaves_the_ledger_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(make_trainer(tmp_path), STEPS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for resume_mode in ("disable", "auto"):
        trainer = make_trainer(tmp_path, resume_mode=resume_mode)
        OmegaConf.update(trainer.config, "trainer.val_only", True)
        trainer.run_config = RunConfig.parse(trainer.config)
        monkeypatch.setattr(RayPPOTrainer, "_validate", lambda self: {"val": 1.0})
        trainer._load_checkpoint()
        assert trainer._validate() == {"val": 1.0}
        end(trainer)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_group_that_fails_is_replaced_by_the_next_prompt(tmp_path: Path) -> None:
    uid = collect(make_trainer(tmp_path), STEPS)[1][1][0].prepared.non_tensor_batch["uid"][0]
    found = collect(make_trainer(tmp_path, fails=[uid]), STEPS)
    trained = numbers(found)
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    assert len(set(range(STEPS * GROUPS + 1)) - set(trained)) == 1
    assert found[STEPS][2]["fully_async/count/failed_samples"] == 1


def test_weights_that_were_not_published_are_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.async_rollout_manager.sync_weights = lambda step: setattr(trainer.async_rollout_manager, "number", 99)
    with pytest.raises(RuntimeError, match=r"weights number 99.*known are \[10\]"):
        collect(trainer, STEPS)
    end(trainer)


def test_an_error_of_an_agent_loop_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    def receive(pending: PendingGeneration) -> DataProto:
        raise WrongInput("row 3: agent loop failed")

    trainer.async_rollout_manager.receive = receive
    with pytest.raises(WrongInput, match="row 3: agent loop failed"):
        collect(trainer, STEPS)
    end(trainer)


def test_the_end_of_the_data_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.config.trainer.total_training_steps, trainer.config.trainer.total_epochs = None, 1
    trainer.run_config = RunConfig.parse(trainer.config)
    with pytest.raises(loaders.EndOfDataError):
        collect(trainer, STEPS)
    assert trainer.global_steps == 1 + ROWS // GROUPS
    end(trainer)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    collect(trainer, 1)
    trainer._save_checkpoint()
    end(trainer)
    path = tmp_path / "global_step_1" / FILE_NAME
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WrongInput, match=r"groups\.pkl.*would be lost"):
        load_groups(path, [], trainer._group)
    path.unlink()
    with pytest.raises(WrongInput, match=r"groups\.pkl is missing"):
        load_groups(path, [], trainer._group)


def test_groups_that_a_lower_limit_makes_too_old_are_dropped_with_a_reason(tmp_path: Path) -> None:
    wide = {"staleness_threshold": 3.0, "max_off_policy_threshold": 3}
    first = make_trainer(tmp_path, seed=4, **wide)
    before = collect(first, 3)
    first.async_rollout_manager.finish_some()
    while len([group for group in first.scheduler.outstanding if group.output is not None]) < 5:
        first.async_rollout_manager.finish_some()
    first._save_checkpoint()
    end(first)
    second = resumed(tmp_path, 3, first.checkpoints.saved[3][0])
    after = collect(second, STEPS)
    assert max(metrics["fully_async/versions_behind/max"] for _, _, metrics in after.values()) <= 1
    events = list(LedgerReader(tmp_path / "ledger.sqlite").events("dropped"))
    assert events and all("lower than when it was sampled" in event.facts["reason"] for event in events)
    trained = numbers(before) + numbers(after)
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    assert {event.facts["number"] for event in events}.isdisjoint(trained)


def test_work_that_is_too_old_is_dropped_and_replaced_if_the_run_says_so(tmp_path: Path) -> None:
    options = {"staleness_threshold": 3.0, "max_off_policy_threshold": 1, "off_policy_strategy": "drop"}
    dropped: set[int] = set()
    for seed in range(3):
        trainer = make_trainer(tmp_path / str(seed), seed, **options)
        found = collect(trainer, STEPS)
        assert max(metrics["fully_async/versions_behind/max"] for _, _, metrics in found.values()) <= 1
        with LedgerReader(tmp_path / str(seed) / "ledger.sqlite") as reader:
            events = list(reader.events("dropped"))
            assert Audit.of(reader.events()).is_exact
        assert all("older than async_training.max_off_policy_threshold=1 allows" in e.facts["reason"] for e in events)
        numbers_of = {event.facts["number"] for event in events}
        assert found[STEPS][2]["fully_async/count/dropped_stale_samples"] == len(events)
        trained = numbers(found)
        assert len(trained) == len(set(trained)) == STEPS * GROUPS and numbers_of.isdisjoint(trained)
        dropped |= numbers_of
    assert dropped
    paced = make_trainer(tmp_path / "paced", 0, **options | {"off_policy_strategy": "wait"})
    collect(paced, STEPS)
    assert not list(LedgerReader(tmp_path / "paced" / "ledger.sqlite").events("dropped"))


def test_a_run_that_ends_within_a_step_keeps_its_groups(tmp_path: Path) -> None:
    """As where no response of a step could be scored: the checkpoint is that of the step before."""
    first = make_trainer(tmp_path, seed=4)
    before = collect(first, 3)
    first.state.step -= 1
    first._save_checkpoint()
    end(first)
    second = resumed(tmp_path, 2, first.checkpoints.saved[2][0])
    after = collect(second, STEPS)
    assert numbers({3: after[3]}) == numbers({3: before[3]})
    assert sorted(numbers({1: before[1], 2: before[2]}) + numbers(after)) == list(range(STEPS * GROUPS))


def test_other_sizes_than_those_of_the_record_are_refused(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, seed=4)
    collect(first, 4, saves=[2])
    end(first)
    position = first.checkpoints.saved[2][0]
    for key, value, words in (
        ("data.train_batch_size", 4, r"recorded with 2 groups, and has 4 now.*ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.n", 3, r"has 2 kept responses, and the run asks for 3.*rollout\.n"),
    ):
        with pytest.raises(WrongInput, match=words):
            second = resumed(tmp_path, 2, position, changed={key: value})
            collect(second, STEPS)
        end(second)


def test_versions_are_moved_also_beside_a_row_without_a_trajectory() -> None:
    meta = {"versions": [3, None], "sampled_by": [[(3, 5), (4, 2)], []]}
    output = DataProto.from_dict({"responses": torch.ones(2, 3)}, meta_info=meta)
    found = moved(output, 10)
    assert found.meta_info == {"versions": [13, None], "sampled_by": [[(13, 5), (14, 2)], []]}
    assert output.meta_info == meta


def test_responses_that_go_on_under_new_weights_are_counted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    loops = trainer.async_rollout_manager
    receive = loops.receive

    def partial(pending: PendingGeneration) -> DataProto:
        output = receive(pending)
        output.meta_info["sampled_by"] = [[(loops.ended[id(pending)], 1), (loops.number, 1)]] * len(output)
        return output

    loops.receive = partial
    found = collect(trainer, STEPS)
    spans = {metrics["fully_async/partial/max_partial_span"] for _, _, metrics in found.values()}
    assert max(spans) == 1
    shares = [metrics["fully_async/partial/partial_ratio"] for _, _, metrics in found.values()]
    assert 0 < max(shares) <= 1


def test_a_run_whose_loops_always_fail_ends(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    receive = trainer.async_rollout_manager.receive

    def failing(pending: PendingGeneration) -> DataProto:
        output = receive(pending)
        for line in output.meta_info["attempts"]:
            line |= {"outcome": "replaced", "reason": "the tool is away"}
        return output

    trainer.async_rollout_manager.receive = failing
    with pytest.raises(RuntimeError, match="17 prompts failed one after the other, at last: the tool is away"):
        collect(trainer, STEPS)
    end(trainer)


def test_an_update_does_not_wait_for_ever(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    OmegaConf.update(trainer.config, "trainer.worker_call_timeout_s", 0.05)
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.async_rollout_manager.finish_some = lambda: None  # no server answers
    with pytest.raises(TimeoutError, match=r"worker_call_timeout_s=0\.05: the servers have the prompts \[0, 1"):
        collect(trainer, STEPS)
    end(trainer)
