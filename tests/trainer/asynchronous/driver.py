"""A trainer whose loops answer by the seed of the request, after a delay."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from verl.experimental.agent_loop.held import KeptTokens
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.asynchronous.kept import FILE_NAME
from verl.trainer.asynchronous.trainer import AsyncTrainer
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.utils.dataset.factory import SeededRandomSampler
from verl.utils.observe.digest import tensor_digest

ROWS, GROUPS, SAMPLES, STEPS = 7, 2, 2, 6


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.trainer.asynchronous.scheduler._LOOK_S", 0.001)


class Prompts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        ones = torch.ones(2, dtype=torch.long)
        drawn = int(torch.randint(1000, (1,)))  # as a data set that augments its rows
        tokens = {"input_ids": ones * (index + 5), "attention_mask": ones, "position_ids": ones - 1}
        return tokens | {"extra_info": {"index": index, "drawn": drawn}}


def answer(requests: DataProto, version: int, weights: int = 0) -> DataProto:
    """Answer with one token, which seed, prompt and weights decide."""
    prompts, seeds = requests.batch["input_ids"], requests.batch["sampling_seed"]
    responses = (seeds[:, None] % 97 + weights) % 97 + 3
    mask = torch.ones_like(responses)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([requests.batch["attention_mask"], mask], 1),
        "position_ids": torch.arange(3).expand(len(prompts), 3).clone(),
    }
    attempts = [{"uid": uid, "outcome": "ok", "reason": None} for uid in requests.non_tensor_batch["uid"]]
    by = [[(version, 1)]] * len(prompts)
    meta = {
        "versions": [version] * len(prompts),
        "sampled_by": by,
        "attempts": attempts,
        "seconds": [],
        "elapsed_s": 0.0,
    }
    return DataProto.from_dict(tensors, {"uid": requests.non_tensor_batch["uid"]}, meta)


@dataclass
class Loops:
    """Answers by the engine's number of the weights at the time of the request, in any order.

    With ``reads_weights`` the answers differ by these weights.
    """

    source: random.Random
    fails: set[str] = field(default_factory=set)
    number: int = 0
    reads_weights: bool = False
    weights: dict[int, str] = field(default_factory=dict)
    servers: Any = None
    waiting: list[tuple[PendingGeneration, "Future[None]", int]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    ended: dict[int, int] = field(default_factory=dict)
    is_held: bool = False

    def __post_init__(self) -> None:
        self.servers = SimpleNamespace(replicas=[None], look_after=lambda *arguments: self.finish_some())

    def send(self, requests: DataProto) -> PendingGeneration:
        future: Future[None] = Future()
        pending = PendingGeneration(requests, refs=[SimpleNamespace(future=lambda: future)])
        with self.lock:
            self.waiting.append((pending, future, self.number))
        return pending

    def finish_some(self) -> None:
        """Finish one request at least, and others by chance."""
        with self.lock:
            count = self.source.randint(1, max(1, len(self.waiting)))
            ended = [self.waiting.pop(self.source.randrange(len(self.waiting))) for _ in range(count) if self.waiting]
        for pending, future, number in ended:
            self.ended[id(pending)] = number
            future.set_result(None)

    def receive(self, pending: PendingGeneration) -> DataProto:
        number = self.ended[id(pending)]
        output = answer(pending.prompts, number, int(self.weights[number], 16) if self.reads_weights else 0)
        if set(output.non_tensor_batch["uid"]) & self.fails:
            for line in output.meta_info["attempts"]:
                line["outcome"] = "replaced"
        return output

    def interrupt(self) -> list[KeptTokens]:
        self.is_held = True
        return []

    def proceed(self) -> None:
        self.is_held = False

    def give_up(self, output: DataProto) -> None:
        assert {line["outcome"] for line in output.meta_info["attempts"]} == {"replaced"}

    def gather(self, outputs: list[DataProto], seconds: float, planned_version: int) -> DataProto:
        whole = DataProto.concat([DataProto(each.batch, dict(each.non_tensor_batch)) for each in outputs])
        whole.meta_info = {"metrics": {}, "timing": {}}
        return whole

    def sync_weights(self, step: int) -> None:
        self.number = self.trained()
        self.weights[self.number] = self.trained_weights()

    def sender(self, step: int) -> None:
        return None

    def take_attempts(self) -> list[Any]:
        return []

    def take_timeline(self) -> list[Any]:
        return []


class Checkpoints:
    """Checkpoints of the driver's part alone."""

    may_be_written = False
    newest: int | None = None

    def __init__(self, trainer: AsyncTrainer, root: Path) -> None:
        self.trainer, self.root, self.saved, self.extra_files = trainer, root, {}, []

    def begin(self) -> Path:
        return self.root / f"global_step_{self.trainer.global_steps}"

    def resume(self) -> int:
        return self.trainer.global_steps

    def check_extra_file(self, path: Path) -> None:
        pass

    def position(self) -> DataPosition:
        return DataPosition(self.trainer.train_dataloader.state_dict(), self.trainer.state.epoch)

    def save(self, position: DataPosition, extra_files: Any = ()) -> None:
        self.saved[self.trainer.global_steps] = position, list(extra_files)


def make_trainer(
    folder: Path,
    seed: int = 0,
    fails: Any = (),
    resume_mode: str = "disable",
    cls: type[RayPPOTrainer] = AsyncTrainer,
    **pace: Any,
) -> Any:
    """Return a trainer; ``pace`` holds keys of ``async_training``."""
    trainer: Any = cls.__new__(cls)
    trainer.config = OmegaConf.create(
        {
            "data": {
                "train_batch_size": GROUPS,
                "gen_batch_size": 1 if pace.get("mode") is None else None,
                "dataloader_num_workers": 0,
                "shuffle": True,
                "seed": 5,
            },
            "trainer": {
                "total_training_steps": STEPS,
                "balance_batch": False,
                "resume_mode": resume_mode,
                "save_freq": 1,
            },
            "actor_rollout_ref": {"hybrid_engine": False, "rollout": {"n": SAMPLES, "mode": "async"}},
            "algorithm": {"adv_estimator": "grpo"},
            "async_training": {"mode": "fully_async", "trigger_parameter_sync_step": 1, "staleness_threshold": 1.0}
            | {"max_off_policy_threshold": 1}
            | pace,
        }
    )
    trainer.state = RunState(seed=1, total_steps=STEPS)
    trainer.hybrid_engine, trainer.use_rm = False, False
    loops = Loops(random.Random(seed), set(fails))
    trainer.async_rollout_mode, trainer.async_rollout_manager = True, loops
    trainer.reward_fn, trainer.device_name = reward, "cpu"
    trainer.engine_number = 10
    loops.trained = lambda: trainer.engine_number
    loops.trained_weights = lambda: trainer.weights
    trainer.weights = "0"
    trainer.actor_rollout_wg = SimpleNamespace(
        world_size=1,
        trained_version=lambda: [trainer.engine_number],
        weights_digest=lambda: [trainer.weights],
    )
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.records = SimpleNamespace(
        phase=lambda *arguments: None,
        log_attempts=lambda attempts, step=None: None,
        has_timeline=lambda step: False,
        keep_spans=lambda spans: None,
    )
    prompts = Prompts()
    sampler = SeededRandomSampler(prompts, seed=5)
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, prompts, None, sampler)
    trainer.checkpoints = Checkpoints(trainer, folder)
    return trainer


def reward(data: DataProto, return_dict: bool) -> dict[str, Any]:
    return {"reward_tensor": torch.rand(data.batch["responses"].shape), "reward_extra_info": {}}


def rows_of(batch: DataProto) -> torch.Tensor:
    """Return what an update reads of a batch."""
    return torch.cat([batch.batch[name].flatten() for name in ("input_ids", "response_mask")])


def collect(
    trainer: Any, until: int, saves: Any = (), after: Callable[[], Any] = lambda: None
) -> dict[int, tuple[DataProto, list[Any], dict[str, float]]]:
    """Collect the batches of the next steps as ``fit`` does; ``after`` is called after each update."""
    rows = trainer._training_rows()
    found = {}
    try:
        while trainer.global_steps < until:
            trainer.state.begin_step()
            metrics: dict[str, float] = {}
            timing: dict[str, float] = {}
            trainer._sync_before_generation(timing)
            batch = trainer.collect(rows, metrics, timing)
            trainer._add_scores(batch, metrics)
            trainer.state.weights_version += 1
            trainer.engine_number += 1
            trainer.weights = tensor_digest(torch.cat([torch.tensor(list(trainer.weights.encode())), rows_of(batch)]))
            trainer.record.updated(trainer.global_steps - 1, [trainer.weights], trainer.engine_number)
            after()
            if trainer.global_steps in saves:
                trainer._save_checkpoint()
            found[trainer.global_steps] = batch, list(trainer._taken), metrics
    finally:
        if trainer.global_steps == until == STEPS:
            end(trainer)
    return found


def end(trainer: Any) -> None:
    trainer.scheduler.stop()
    trainer.record.close()


def numbers(found: Any) -> list[int]:
    return [group.number for _, taken, _ in found.values() for group in taken]


def resumed(
    folder: Path, step: int, position: DataPosition | None, weights: str = "0", changed: Any = None, **options: Any
) -> Any:
    """Return the trainer of another process that has loaded a checkpoint, or found none."""
    trainer = make_trainer(folder, seed=9, resume_mode="auto", **options)
    for key, value in (changed or {}).items():
        OmegaConf.update(trainer.config, key, value)
        trainer.run_config = RunConfig.parse(trainer.config)
    trainer.weights = weights
    if position is not None:
        trainer.engine_number = 77  # the engines count anew
        trainer.train_dataloader.load_state_dict(position.loader_state)
        trainer.state.step, trainer.state.epoch = step, position.epoch
        trainer.checkpoints.extra_files = [folder / f"global_step_{step}" / FILE_NAME]
    else:
        trainer.checkpoints.resume = lambda: None
    trainer._load_checkpoint()
    return trainer
