"""The asynchronous trainer over loops that answer by the seed of the request, after a delay."""

import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from verl.errors import WrongInput
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.asynchronous.kept import FILE_NAME, load_groups
from verl.trainer.asynchronous.trainer import AsyncTrainer
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.state import RunState
from verl.utils.dataset.factory import SeededRandomSampler

ROWS, GROUPS, SAMPLES, STEPS = 7, 2, 2, 6
TURNS = "__turns__"


class Prompts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        ones = torch.ones(2, dtype=torch.long)
        drawn = int(torch.randint(1000, (1,)))  # as a data set that augments its rows
        tokens = {"input_ids": ones * (index + 5), "attention_mask": ones, "position_ids": ones - 1}
        return tokens | {"extra_info": {"index": index, "drawn": drawn}}


def answer(requests: DataProto, version: int) -> DataProto:
    """Answer with one token, which seed and prompt decide."""
    prompts, seeds = requests.batch["input_ids"], requests.batch["sampling_seed"]
    responses = (seeds[:, None] % 97) + 3
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
    meta = {"versions": [version] * len(prompts), "attempts": attempts, "seconds": [], "elapsed_s": 0.0}
    return DataProto.from_dict(tensors, {"uid": requests.non_tensor_batch["uid"]}, meta)


@dataclass
class Loops:
    """Answers by the engine's number of the weights at the time of the request, in any order."""

    source: random.Random
    fails: set[str] = field(default_factory=set)
    number: int = 0
    servers: Any = None
    waiting: list[tuple[PendingGeneration, "Future[None]", int]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    ended: dict[int, int] = field(default_factory=dict)

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
        output = answer(pending.prompts, self.ended[id(pending)])
        if set(output.non_tensor_batch["uid"]) & self.fails:
            for line in output.meta_info["attempts"]:
                line["outcome"] = "replaced"
        return output

    def give_up(self, output: DataProto) -> None:
        assert {line["outcome"] for line in output.meta_info["attempts"]} == {"replaced"}

    def gather(self, outputs: list[DataProto], seconds: float, planned_version: int) -> DataProto:
        whole = DataProto.concat([DataProto(each.batch, dict(each.non_tensor_batch)) for each in outputs])
        whole.meta_info = {"metrics": {}, "timing": {}}
        return whole

    def sync_weights(self, step: int) -> None:
        self.number = self.trained()

    def sender(self, step: int) -> None:
        return None

    def take_attempts(self) -> list[Any]:
        return []


class Checkpoints:
    """Checkpoints of the driver's part alone."""

    may_be_written = False

    def __init__(self, trainer: AsyncTrainer, root: Path) -> None:
        self.trainer, self.root, self.saved, self.extra_files = trainer, root, {}, []

    def begin(self) -> Path:
        return self.root / f"global_step_{self.trainer.global_steps}"

    def resume(self) -> int:
        return self.trainer.global_steps

    def check_extra_file(self, path: Path) -> None:
        pass

    def save(self, extra_files: Any = ()) -> None:
        state = DataPosition(self.trainer.train_dataloader.state_dict(), self.trainer.state.epoch)
        self.saved[self.trainer.global_steps] = state, list(extra_files)


def make_trainer(folder: Path, seed: int = 0, fails: Any = (), **pace: Any) -> Any:
    trainer: Any = AsyncTrainer.__new__(AsyncTrainer)
    trainer.config = OmegaConf.create(
        {
            "data": {
                "train_batch_size": GROUPS,
                "gen_batch_size": 1,
                "dataloader_num_workers": 0,
                "shuffle": True,
                "seed": 5,
            },
            "trainer": {"total_training_steps": STEPS, "balance_batch": False},
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
    trainer.actor_rollout_wg = SimpleNamespace(world_size=1, trained_version=lambda: [trainer.engine_number])
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.records = SimpleNamespace(phase=lambda *arguments: None, log_attempts=lambda attempts, step=None: None)
    prompts = Prompts()
    sampler = SeededRandomSampler(prompts, seed=5)
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, prompts, None, sampler)
    trainer.checkpoints = Checkpoints(trainer, folder)
    return trainer


def reward(data: DataProto, return_dict: bool) -> dict[str, Any]:
    return {"reward_tensor": torch.rand(data.batch["responses"].shape), "reward_extra_info": {}}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.trainer.asynchronous.scheduler._LOOK_S", 0.001)


def collect(trainer: Any, until: int) -> dict[int, tuple[DataProto, list[Any], dict[str, float]]]:
    """Collect the batches of the next steps as ``fit`` does."""
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
            found[trainer.global_steps] = batch, list(trainer._taken), metrics
    finally:
        if trainer.global_steps == until == STEPS:
            trainer.scheduler.stop()
    return found


def numbers(found: Any) -> list[int]:
    return [group.number for _, taken, _ in found.values() for group in taken]


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
    first.scheduler.stop()
    position, names = first.checkpoints.saved[stop]
    assert names == [FILE_NAME]
    second = make_trainer(tmp_path, seed=9)
    second.engine_number = 77  # the engines count anew
    second.train_dataloader.load_state_dict(position.loader_state)
    second.state.step, second.state.epoch = stop, position.epoch
    second.checkpoints.extra_files = [tmp_path / f"global_step_{stop}" / FILE_NAME]
    kept = {group.number: group.output for group in first.scheduler.outstanding if group.output is not None}
    second._load_checkpoint()
    after = collect(second, STEPS)
    assert sorted(numbers(before) + numbers(after)) == list(range(STEPS * GROUPS))
    taken = {group.number: group.output for _, groups, _ in after.values() for group in groups}
    for number, output in kept.items():
        assert torch.equal(taken[number].batch["responses"], output.batch["responses"])
    assert max(metrics["fully_async/versions_behind/max"] for _, _, metrics in after.values()) <= 1


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
    trainer.scheduler.stop()


def test_an_error_of_an_agent_loop_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    def receive(pending: PendingGeneration) -> DataProto:
        raise WrongInput("row 3: agent loop failed")

    trainer.async_rollout_manager.receive = receive
    with pytest.raises(WrongInput, match="row 3: agent loop failed"):
        collect(trainer, STEPS)
    trainer.scheduler.stop()


def test_the_end_of_the_data_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.config.trainer.total_training_steps, trainer.config.trainer.total_epochs = None, 1
    trainer.run_config = RunConfig.parse(trainer.config)
    with pytest.raises(loaders.EndOfDataError):
        collect(trainer, STEPS)
    assert trainer.global_steps == 1 + ROWS // GROUPS
    trainer.scheduler.stop()


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    collect(trainer, 1)
    trainer._save_checkpoint()
    trainer.scheduler.stop()
    path = tmp_path / "global_step_1" / FILE_NAME
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WrongInput, match=r"groups\.pkl.*would be lost"):
        load_groups(path, [], trainer._group)
    path.unlink()
    with pytest.raises(WrongInput, match=r"groups\.pkl is missing"):
        load_groups(path, [], trainer._group)
