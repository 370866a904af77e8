"""Generation and training in turns on the same devices, over loops that answer after a delay."""

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.trainer.asynchronous.driver import GROUPS, STEPS, Loops, collect, end, make_trainer, numbers
from tests.trainer.asynchronous.driver import quick_looks as quick_looks
from verl.experimental.agent_loop.held import KEPT_COLUMN, KeptTokens
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.asynchronous.ledger import LedgerReader
from verl.trainer.config.run_config import RunConfig


@dataclass
class Turns(Loops):
    """Serves between ``go_on`` and ``hold``; what is under way then goes on later."""

    is_awake: bool = False
    interrupted: int = 0

    def __post_init__(self) -> None:
        self.servers = None

    def send(self, requests: DataProto) -> PendingGeneration:
        assert self.is_awake, "the engines sleep"
        return super().send(requests)

    def go_on(self, step: int) -> None:
        assert not self.is_awake
        self.number = self.trained()
        self.is_awake = True

    def hold(self) -> list[KeptTokens]:
        assert self.is_awake
        self.is_awake = False
        self.interrupted += len(self.waiting)
        return [kept_of(pending.prompts, number) for pending, _, number in self.waiting]


def kept_of(request: DataProto, number: int) -> KeptTokens:
    uid, sample = request.non_tensor_batch["uid"][0], int(request.batch["sample"][0])
    return KeptTokens(uid, sample, request.batch["input_ids"][0].tolist(), [int(sample) + 40], [-0.5], [(number, 1)])


def turning(folder: Path, seed: int, resume_mode: str = "disable", **options: Any) -> tuple[Any, Turns]:
    trainer = make_trainer(folder, seed, resume_mode=resume_mode)
    OmegaConf.update(trainer.config, "async_training", {"mode": "colocate_async", **options})
    trainer.run_config = RunConfig.parse(trainer.config)
    loops = Turns(random.Random(seed))
    loops.trained = lambda: trainer.engine_number
    trainer.async_rollout_manager = loops
    trainer._look_after_servers = loops.finish_some
    return trainer, loops


@pytest.mark.parametrize("partial", [True, False])
def test_engines_serve_until_an_update_has_its_groups(tmp_path: Path, partial: bool) -> None:
    interrupted = 0
    for seed in range(3):
        trainer, loops = turning(tmp_path, seed, partial_rollout=partial)
        found = collect(trainer, STEPS)
        assert sorted(numbers(found)) == list(range(STEPS * GROUPS))
        assert {metrics["fully_async/versions_behind/max"] for _, _, metrics in found.values()} <= {0.0, 1.0}
        assert found[STEPS][2]["fully_async/count/current_param_version"] == STEPS - 1
        assert not loops.is_awake
        interrupted += loops.interrupted
    assert bool(interrupted) == partial


def test_an_interrupted_response_goes_on_in_the_next_run(tmp_path: Path) -> None:
    """Its tokens have the numbers of the run's versions in the ledger, and those of the engine in the request."""
    first, loops = turning(tmp_path, 1)
    finish_one_by_one(first, loops)
    collect(first, 3)
    held = {key_of(pending.prompts) for pending, _, _ in loops.waiting}
    assert held
    end(first)
    second, others = turning(tmp_path, 2, resume_mode="auto")
    second.checkpoints.resume = lambda: None
    sent = {}
    send = others.send

    def noting(requests: DataProto) -> PendingGeneration:
        kept = requests.non_tensor_batch.get(KEPT_COLUMN)
        sent[key_of(requests)] = None if kept is None else kept[0]
        return send(requests)

    others.send = noting  # type: ignore[method-assign]
    second._load_checkpoint()
    collect(second, STEPS)
    assert {key for key, kept in sent.items() if kept is not None} == held
    for (uid, sample), kept in sent.items():
        if kept is not None:
            assert (kept.uid, kept.sample, kept.token_ids) == (uid, sample, [sample + 40])
            assert kept.versions[0][0] in second._version_of
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        facts = next(reader.events("resumed")).facts
    assert facts["continued"] == len(held)


def finish_one_by_one(trainer: Any, loops: Turns) -> None:
    """Finish the oldest response once the one before has arrived, so that an update finds others under way."""
    counts = {"finished": 0, "received": 0}
    receive = loops.receive

    def counting(pending: PendingGeneration) -> DataProto:
        counts["received"] += 1
        return receive(pending)

    def finish() -> None:
        if counts["finished"] == counts["received"]:
            counts["finished"] += 1
            loops.finish_some()

    loops.source = SimpleNamespace(randint=lambda low, high: 1, randrange=lambda count: 0)  # type: ignore[assignment]
    loops.receive = counting  # type: ignore[method-assign]
    trainer._look_after_servers = finish


def key_of(request: DataProto) -> tuple[str, int]:
    return str(request.non_tensor_batch["uid"][0]), int(request.batch["sample"][0])


def test_validation_gives_the_weights_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, loops = turning(tmp_path, 0)
    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.RayPPOTrainer._validate", lambda self: {"val": 1.0})
    collect(trainer, 1)
    assert trainer._validate() == {"val": 1.0} and not loops.is_awake
    trainer.scheduler.stop()
