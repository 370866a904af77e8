"""Generation a step ahead in the trainer, over loops that answer by the seed of the request."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.one_step_off_policy import ray_trainer
from recipe.one_step_off_policy.generation import FILE_NAME, load_generation
from recipe.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from verl.errors import WrongInput
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.utils.dataset.factory import SeededRandomSampler

ROWS, PROMPTS, SAMPLES, STEPS = 6, 2, 2, 5


class Prompts(torch.utils.data.Dataset):
    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        ones = torch.ones(2, dtype=torch.long)
        drawn = int(torch.randint(1000, (1,)))  # as a data set that augments its rows
        tokens = {"input_ids": ones * (index + 5 + self.shift), "attention_mask": ones, "position_ids": ones - 1}
        return tokens | {"extra_info": {"index": index, "drawn": drawn}}


def answer(requests: DataProto) -> DataProto:
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
    return DataProto.from_dict(tensors, {"uid": requests.non_tensor_batch["uid"]}, {"metrics": {}, "timing": {}})


@dataclass
class Loops:
    """What the trainer asks of the agent loops, in order, with the step of each batch."""

    calls: list[Any] = field(default_factory=list)

    def begin(self, requests: DataProto, trains_meanwhile: bool) -> PendingGeneration:
        assert trains_meanwhile
        self.calls.append(("begin", requests.meta_info["global_steps"]))
        return PendingGeneration(requests)

    def finish(self, pending: PendingGeneration) -> DataProto:
        self.calls.append(("finish", pending.step))
        return answer(pending.prompts)

    def generate_sequences(self, requests: DataProto) -> DataProto:
        self.calls.append(("generate", requests.meta_info["global_steps"]))
        return answer(requests)

    def sync_weights(self, step: int) -> None:
        self.calls.append(("sync", step))

    def abandon(self, pending: PendingGeneration) -> None:
        self.calls.append(("abandon", pending.step))

    def take_attempts(self) -> list[Any]:
        return [{"uid": "u"}]

    def take_timeline(self) -> list[Any]:
        return []


class Checkpoints:
    """Checkpoints of the driver's part alone."""

    may_be_written = False

    def __init__(self, trainer: RayPPOTrainer, root: Path) -> None:
        self.trainer, self.root, self.saved, self.extra_files = trainer, root, {}, []

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def begin(self) -> Path:
        return self.folder(self.trainer.global_steps)

    def position(self) -> DataPosition:
        return DataPosition(self.trainer.train_dataloader.state_dict(), self.trainer.state.epoch)

    def save(self, position: DataPosition | None = None, extra_files: Any = ()) -> None:
        self.saved[self.trainer.global_steps] = position or self.position(), list(extra_files)


def make_trainer(cls: type[RayPPOTrainer], folder: Path, dataset: Prompts | None = None) -> Any:
    data = {"train_batch_size": PROMPTS, "dataloader_num_workers": 0, "shuffle": True, "seed": 5}
    trainer: Any = cls.__new__(cls)
    trainer.config = OmegaConf.create(
        {
            "data": data,
            "trainer": {"total_training_steps": STEPS, "balance_batch": False},
            "actor_rollout_ref": {"hybrid_engine": False, "rollout": {"n": SAMPLES, "mode": "async"}},
            "algorithm": {"adv_estimator": "grpo"},
        }
    )
    trainer.state = RunState(seed=1, total_steps=STEPS)
    trainer.hybrid_engine, trainer.use_rm = False, False
    trainer.async_rollout_mode, trainer.async_rollout_manager = True, Loops()
    trainer.reward_fn, trainer.device_name = reward, "cpu"
    trainer.actor_rollout_wg = SimpleNamespace(world_size=1)
    trainer.run_config = RunConfig.parse(trainer.config)
    trainer.attempts = []
    trainer.records = SimpleNamespace(
        phase=lambda *arguments: None,
        has_timeline=lambda step: False,
        keep_spans=lambda spans: None,
        log_attempts=lambda attempts, step=None: trainer.attempts.append((step, attempts)),
    )
    prompts = dataset or Prompts()
    sampler = SeededRandomSampler(prompts, seed=5)
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, prompts, None, sampler)
    trainer.checkpoints = Checkpoints(trainer, folder)
    return trainer


def reward(data: DataProto, return_dict: bool) -> dict[str, Any]:
    """Score at random, as a judge that samples does."""
    return {"reward_tensor": torch.rand(data.batch["responses"].shape), "reward_extra_info": {}}


def collect(trainer: Any, until: int, after: Any = None) -> dict[int, DataProto]:
    """Collect the batches of the next steps as ``fit`` does; ``after`` is done after each step."""
    rows = trainer._training_rows()
    batches = {}
    while trainer.global_steps < until:
        trainer.state.begin_step()
        metrics, timing = {}, {}
        trainer._sync_before_generation(timing)
        batch = trainer.collect(rows, metrics, timing)
        trainer._add_scores(batch, metrics)
        trainer.state.weights_version += 1
        batches[trainer.global_steps] = batch
        if after is not None:
            after()
    return batches


def content(batch: DataProto) -> list[Any]:
    tensors = {key: batch.batch[key].tolist() for key in sorted(batch.batch.keys())}
    return [tensors, {key: batch.non_tensor_batch[key].tolist() for key in sorted(batch.non_tensor_batch)}]


def test_each_batch_is_asked_for_one_step_ahead(tmp_path: Path) -> None:
    """The weights that sample it are those after the step before the one in which it is asked for."""
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)
    collect(trainer, STEPS)
    expected = [("begin", 1), ("finish", 1), ("begin", 2), ("finish", 2), ("begin", 3), ("finish", 3), ("begin", 4)]
    assert trainer.async_rollout_manager.calls[:7] == expected
    assert trainer.async_rollout_manager.calls[-1] == ("finish", STEPS)  # nothing is asked for after the last step
    assert [step for step, _ in trainer.attempts] == list(range(1, STEPS + 1))


def test_the_batches_are_those_of_the_main_trainer(tmp_path: Path) -> None:
    """Prompts, augmentation, uids, seeds and random scores; three steps are an epoch."""
    ahead = collect(make_trainer(OneStepOffRayTrainer, tmp_path), STEPS)
    usual = collect(make_trainer(RayPPOTrainer, tmp_path), STEPS)
    assert {step: content(batch) for step, batch in ahead.items()} == {k: content(v) for k, v in usual.items()}


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_resumed_run_takes_the_responses_of_the_checkpoint(tmp_path: Path, stop: int) -> None:
    whole = collect(make_trainer(OneStepOffRayTrainer, tmp_path), STEPS)
    first = make_trainer(OneStepOffRayTrainer, tmp_path)
    collect(first, stop)
    first._save_checkpoint()
    assert ("finish", stop + 1) == first.async_rollout_manager.calls[-1]
    position, names = first.checkpoints.saved[stop]
    assert names == [FILE_NAME]
    second = resume(tmp_path, stop, position)
    found = collect(second, STEPS)
    assert all(content(found[step]) == content(whole[step]) for step in found) and len(found) == STEPS - stop
    asked = [step for call, step in second.async_rollout_manager.calls if call == "begin"]
    assert asked == list(range(stop + 2, STEPS + 1))
    assert second.attempts[0] == (stop + 1, [{"uid": "u"}])


def resume(folder: Path, step: int, position: DataPosition, dataset: Prompts | None = None) -> Any:
    trainer = make_trainer(OneStepOffRayTrainer, folder, dataset)
    trainer.train_dataloader.load_state_dict(position.loader_state)
    trainer.state.step, trainer.state.epoch = step, position.epoch
    trainer._kept = load_generation(trainer.checkpoints.folder(step) / FILE_NAME, [])
    return trainer


def test_responses_to_other_prompts_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = make_trainer(OneStepOffRayTrainer, tmp_path)
    collect(first, 2)
    first._save_checkpoint()
    second = resume(tmp_path, 2, first.checkpoints.saved[2][0], Prompts(shift=1))
    found = collect(second, 3)
    assert ("begin", 3) in second.async_rollout_manager.calls
    assert "answers other prompts" in caplog.text
    assert np.all(found[3].batch["prompts"].numpy() >= 6)


def test_the_last_checkpoint_holds_no_responses(tmp_path: Path) -> None:
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)
    collect(trainer, STEPS)
    trainer._save_checkpoint()
    assert trainer.checkpoints.saved[STEPS][1] == []


def test_validation_waits_for_the_batch_that_older_weights_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)

    def validate(self: RayPPOTrainer) -> dict[str, float]:
        trainer.async_rollout_manager.calls.append("validate")
        return {}

    monkeypatch.setattr(ray_trainer.RayPPOTrainer, "_validate", validate)
    collect(trainer, 2, after=trainer._validate)
    calls = trainer.async_rollout_manager.calls
    assert calls.index(("finish", 2)) + 1 == calls.index("validate")
    assert [call for call in calls if call == ("finish", 2)] == [("finish", 2)]


def test_the_end_of_the_data_ends_the_step_that_has_none(tmp_path: Path) -> None:
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)
    trainer.config.trainer.total_training_steps, trainer.config.trainer.total_epochs = None, 1
    trainer.run_config = RunConfig.parse(trainer.config)
    done = []
    with pytest.raises(loaders.EndOfDataError):
        collect(trainer, STEPS, after=lambda: done.append(trainer.global_steps))
    assert done == [1, 2, 3] and trainer.global_steps == 4


def test_a_run_that_ends_early_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)

    def fit(self: RayPPOTrainer) -> None:
        collect(trainer, 1)
        raise RuntimeError("a worker has died")

    monkeypatch.setattr(ray_trainer.RayPPOTrainer, "fit", fit)
    with pytest.raises(RuntimeError, match="a worker has died"):
        trainer.fit()
    assert trainer.async_rollout_manager.calls[-1] == ("abandon", 2)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(OneStepOffRayTrainer, tmp_path)
    collect(trainer, 1)
    trainer._save_checkpoint()
    path = trainer.checkpoints.folder(1) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WrongInput, match=r"generation\.pkl.*would train on other responses"):
        load_generation(path, [])
    path.unlink()
    with pytest.raises(WrongInput, match=r"generation\.pkl is missing"):
        load_generation(path, [])
