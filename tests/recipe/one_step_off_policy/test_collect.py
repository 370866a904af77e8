"""Generation a step ahead in the trainer, over loops that answer by the seed of the request and by the weights."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from tests.trainer.asynchronous.driver import (
    GROUPS,
    SAMPLES,
    STEPS,
    answer,
    collect,
    end,
    make_trainer,
    numbers,
    resumed,
)
from tests.trainer.asynchronous.driver import quick_looks as quick_looks
from verl.protocol import DataProto
from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.kept import FILE_NAME
from verl.trainer.asynchronous.ledger import LedgerReader
from verl.trainer.asynchronous.record import SEGMENT
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

ONE_STEP_OFF = {"cls": OneStepOffRayTrainer, "mode": "one_step_off"}


def make(folder: Path, seed: int = 0, reads_weights: bool = True, **options: Any) -> Any:
    trainer = make_trainer(folder, seed, **ONE_STEP_OFF | options)
    trainer.async_rollout_manager.reads_weights = reads_weights
    return trainer


def content(batch: DataProto) -> list[Any]:
    """Return all columns but the scores, which these tests draw at random."""
    tensors = {key: batch.batch[key].tolist() for key in sorted(batch.batch.keys()) if key != "token_level_scores"}
    return [tensors, {key: batch.non_tensor_batch[key].tolist() for key in sorted(batch.non_tensor_batch)}]


def contents(found: Any) -> dict[int, list[Any]]:
    return {step: content(batch) for step, (batch, *_) in found.items()}


def in_steps(found: Any) -> dict[int, list[tuple[int, int]]]:
    return {step: [(group.number, group.version) for group in taken] for step, (_, taken, _) in found.items()}


def test_each_batch_is_sampled_one_update_before_it_is_trained(tmp_path: Path) -> None:
    """Whatever the order in which its groups finish, and whenever."""
    runs = []
    for seed in range(4):
        trainer = make(tmp_path, seed)
        loops = trainer.async_rollout_manager
        found = collect(trainer, STEPS, after=loops.finish_some if seed % 2 else lambda: None)
        assert in_steps(found) == {
            step: [(number, max(0, step - 2)) for number in range((step - 1) * GROUPS, step * GROUPS)]
            for step in range(1, STEPS + 1)
        }
        assert not trainer.scheduler.outstanding  # nothing is asked for after the last step
        runs.append((contents(found), trainer.weights))
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_the_batches_are_those_of_the_main_trainer(tmp_path: Path, mode: str) -> None:
    """Prompts, augmentation, uids and seeds; also without a lead and with a publication after every update."""
    options = {"staleness_threshold": 0.0, "max_off_policy_threshold": None} if mode == "fully_async" else {}
    ahead = collect(make(tmp_path, reads_weights=False, mode=mode, **options), STEPS)
    usual = make_trainer(tmp_path, cls=RayPPOTrainer, mode="sync")

    def generate(requests: DataProto) -> DataProto:
        output = answer(requests, usual.engine_number)
        output.meta_info = {"metrics": {}, "timing": {}}
        return output

    usual.async_rollout_manager.generate_sequences = generate
    rows = usual._training_rows()
    expected = {}
    while usual.global_steps < STEPS:
        usual.state.begin_step()
        expected[usual.global_steps] = content(usual.collect(rows, {}, {}))
    assert contents(ahead) == expected
    if mode == "fully_async":
        assert {number: version for taken in in_steps(ahead).values() for number, version in taken} == {
            number: number // GROUPS for number in range(STEPS * GROUPS)
        }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_resumed_run_repeats_the_run_that_was_not_stopped(tmp_path: Path, stop: int, fails: bool) -> None:
    """Also one in which prompts fail: that of the first batch, and two of a later one."""
    options: dict[str, Any] = {}
    if fails:
        uids = {group.number: group.prepared.non_tensor_batch["uid"][0] for group in groups_of(make(tmp_path / "uids"))}
        options["fails"] = [uids[number] for number in (1, 4, 5)]
    trainer = make(tmp_path / "whole", **options)
    whole = collect(trainer, STEPS)
    first = make(tmp_path, seed=2, **options)
    before = collect(first, stop, saves=[stop])
    end(first)
    position, names = first.checkpoints.saved[stop]
    assert names == [FILE_NAME, SEGMENT]
    kept = [group for group in first.scheduler.outstanding if group.output is None]
    assert not kept  # the checkpoint has waited for all of them
    second = resumed(tmp_path, stop, position, first.weights, **ONE_STEP_OFF | options)
    second.async_rollout_manager.reads_weights = True
    after = collect(second, STEPS)
    assert contents(before | after) == contents(whole)
    assert in_steps(before | after) == in_steps(whole)
    assert second.weights == trainer.weights
    if fails:
        assert set(range(STEPS * GROUPS + 3)) - set(numbers(whole)) == {1, 4, 5}


def groups_of(trainer: Any) -> list[Any]:
    return [group for _, taken, _ in collect(trainer, STEPS).values() for group in taken]


@pytest.mark.parametrize("saved", [0, 2, 3])
def test_a_killed_run_repeats_the_run_that_was_not_killed(tmp_path: Path, saved: int) -> None:
    """The groups that were in flight are sampled anew, by the same weights."""
    uids = {group.number: group.prepared.non_tensor_batch["uid"][0] for group in groups_of(make(tmp_path / "uids"))}
    options = {"fails": [uids[1], uids[5]]}
    trainer = make(tmp_path / "whole", **options)
    whole = collect(trainer, STEPS)
    first = make(tmp_path, seed=3, **options)
    weights = {0: "0"}
    collect(first, 4, saves=[saved], after=lambda: weights.setdefault(first.global_steps, first.weights))
    first.async_rollout_manager.finish_some()
    end(first)
    position = first.checkpoints.saved[saved][0] if saved else None
    second = resumed(tmp_path, saved, position, weights[saved], **ONE_STEP_OFF | options)
    second.async_rollout_manager.reads_weights = True
    after = collect(second, STEPS)
    assert contents(after) == {step: each for step, each in contents(whole).items() if step > saved}
    assert second.weights == trainer.weights


def test_a_replay_follows_the_ledger(tmp_path: Path) -> None:
    first = make(tmp_path / "run")
    before = collect(first, STEPS)
    replay = make(tmp_path / "replay", replay=str(tmp_path / "run" / "ledger.sqlite"))
    replay.async_rollout_manager = None  # there are no servers
    assert contents(collect(replay, STEPS)) == contents(before) and replay.weights == first.weights


def test_failed_prompts_are_replaced_by_the_next_ones_whenever_they_fail(tmp_path: Path) -> None:
    """More than the prompts of a batch too: the update then waits for others, which it asks for at once."""
    uids = {group.number: group.prepared.non_tensor_batch["uid"][0] for group in groups_of(make(tmp_path))}
    for failed in ([0, 3], [0, 1, 2], [1, 2, 3, 4]):
        runs = []
        for seed in range(3):
            trainer = make(tmp_path, seed, fails=[uids[number] for number in failed])
            loops = trainer.async_rollout_manager
            found = collect(trainer, STEPS, after=loops.finish_some if seed % 2 else lambda: None)
            runs.append((contents(found), in_steps(found), trainer.weights))
            assert not set(failed) & set(numbers(found)) and sorted(numbers(found)) == numbers(found)
            assert max(metrics["fully_async/versions_behind/max"] for _, _, metrics in found.values()) <= 1
        assert all(run == runs[0] for run in runs)


def test_validation_waits_for_the_batch_under_way_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collect(make(tmp_path), STEPS)
    trainer = make(tmp_path)
    numbers_of_engine = []

    def validate(self: RayPPOTrainer) -> dict[str, float]:
        assert all(group.output is not None for group in trainer.scheduler.outstanding)
        numbers_of_engine.append(trainer.async_rollout_manager.number)
        return {}

    monkeypatch.setattr(RayPPOTrainer, "_validate", validate)
    assert contents(collect(trainer, STEPS, after=trainer._validate)) == contents(whole)
    assert numbers_of_engine == [10 + step for step in range(1, STEPS + 1)]  # the newest weights


def test_a_run_goes_on_from_a_checkpoint_without_groups(tmp_path: Path) -> None:
    """That of the main trainer, or of the last step: the next two batches are sampled by its weights."""
    first = make(tmp_path)
    collect(first, 2)
    end(first)
    (tmp_path / "ledger.sqlite").unlink()
    trainer = make(tmp_path, resume_mode="auto")
    trainer.state.step = 2
    trainer._load_checkpoint()
    found = in_steps(collect(trainer, STEPS))
    assert found[3] == [(4, 2), (5, 2)] and found[4] == [(6, 2), (7, 2)] and found[5] == [(8, 3), (9, 3)]
    audit = Audit.of(LedgerReader(tmp_path / "ledger.sqlite").events())
    assert audit.is_exact and sorted(audit.updates) == [2, 3, 4, 5]


def test_the_end_of_the_data_ends_the_step_that_has_none(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.config.trainer.total_training_steps, trainer.config.trainer.total_epochs = None, 1
    trainer.run_config = RunConfig.parse(trainer.config)
    done: list[int] = []
    with pytest.raises(loaders.EndOfDataError):
        collect(trainer, STEPS, after=lambda: done.append(trainer.global_steps))
    assert done == [1, 2, 3] and trainer.global_steps == 4
    end(trainer)


def test_another_batch_size_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path)
    collect(first, 4, saves=[2])
    end(first)
    second = resumed(tmp_path, 2, first.checkpoints.saved[2][0], changed={"data.train_batch_size": 4}, **ONE_STEP_OFF)
    with pytest.raises(ValueError, match=r"recorded with 2 groups, and has 4 now.*data\.train_batch_size"):
        collect(second, STEPS)
    end(second)


def test_spans_of_a_batch_stand_in_the_timeline_of_its_step(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    kept: list[Any] = []
    trainer.records.has_timeline = lambda step: step == 3
    trainer.records.keep_spans = lambda spans: kept.append((trainer.global_steps, list(spans)))
    sent: list[Any] = []
    loops = trainer.async_rollout_manager
    send = loops.send

    def noting(requests: DataProto) -> Any:
        sent.append((requests.meta_info["global_steps"], len(requests.meta_info)))
        return send(requests)

    loops.send, loops.take_timeline = noting, lambda: ["part"]
    collect(trainer, STEPS)
    assert {step for step, size in sent if size > 1} == {3}
    assert dict(kept)[3] == ["part"] * GROUPS * SAMPLES


def test_servers_that_die_get_new_weights_only_if_none_has_the_old_ones(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    keeps: set[bool] = set()
    loops = trainer.async_rollout_manager

    def look_after(send: Any, keeps_weights: bool, stop: Any) -> None:
        keeps.add(keeps_weights)
        loops.finish_some()

    loops.servers.look_after = look_after
    collect(trainer, STEPS)
    assert keeps == {True}


def test_the_mode_decides_the_pace() -> None:
    config = OmegaConf.create({"async_training": {"mode": "one_step_off"}})
    decided = RunConfig.parse(config).async_training.decided
    assert (decided.staleness_threshold, decided.trigger_parameter_sync_step) == (1.0, 1)
    assert not decided.partial_rollout and decided.max_off_policy_threshold == 1
