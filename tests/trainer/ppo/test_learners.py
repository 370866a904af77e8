"""Samplers and data sets that learn from each step: a resumed run draws the rows of one that was not interrupted."""

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from examples.tiny_model import byte_tokenizer
from recipe.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from tests.trainer.asynchronous import driver
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.experimental.dynamic_dataset.dynamicgen_dataset import DynamicGenDataset
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import course, loaders
from verl.trainer.ppo.checkpoint import Checkpoints
from verl.trainer.ppo.course import Course
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.trainer.run.ending import EndRequested
from verl.utils.dataset.factory import FileOrderSampler, SeededRandomSampler, warn_of_lost_state
from verl.utils.dataset.rl_dataset import collate_fn

ROWS, BATCH = 11, 2  # five batches a pass and one row that no batch has


class Numbers(torch.utils.data.Dataset):
    """Numbers, of which each step may add some."""

    def __init__(self, size: int = ROWS, growth: int = 0) -> None:
        self.size, self.growth = size, growth

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index < self.size
        return {"x": torch.tensor(index)}

    def on_batch_end(self, batch: Any) -> None:
        self.size += self.growth

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.size = state["size"]


class Learns(AbstractCurriculumSampler):
    """Knows a weight for each row, and says nothing of its place in a pass."""

    def __init__(self, data_source: Any, data_config: Any = None) -> None:
        self.weights = [(7 * row) % 5 for row in range(len(data_source))]

    def __len__(self) -> int:
        return len(self.weights)

    def update(self, batch: Any) -> None:
        for row in batch:
            self.weights[row] += 3

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}  # the list itself, which goes on changing

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = list(state["weights"])


class OrdersOnce(Learns):
    """The order of a pass is that of its beginning."""

    def __iter__(self) -> Any:
        yield from sorted(range(len(self)), key=lambda row: self.weights[row])


class Eager(Learns):
    """Orders the rows when the pass is made, with random numbers from its own generator."""

    def __init__(self, data_source: Any, data_config: Any = None) -> None:
        super().__init__(data_source)
        self.random = random.Random(1)

    def __iter__(self) -> Any:
        order = list(range(len(self)))
        self.random.shuffle(order)
        return iter(sorted(order, key=lambda row: self.weights[row]))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.random.setstate(state["random"])


class Lives(Learns):
    """Each row follows from what the sampler knows at that moment."""

    def __iter__(self) -> Any:
        for place in range(len(self)):
            yield (place + sum(self.weights)) % len(self)


class Draws(Eager):
    """Each row is drawn by the weights, with replacement: the generator tells its place."""

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield self.random.choices(range(len(self)), [weight + 1 for weight in self.weights])[0]


class KeepsPlace(Learns):
    """A sampler that continues a pass by itself."""

    def __init__(self, data_source: Any, data_config: Any = None) -> None:
        super().__init__(data_source)
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < len(self):
            self.place += 1
            yield (self.place - 1 + sum(self.weights)) % len(self)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.place = state["place"]


class TakesPlace(KeepsPlace):
    """A sampler that takes the place of a checkpoint when the next pass begins, as torchdata's do."""

    saved: int | None = None

    def __iter__(self) -> Any:
        self.place, self.saved = self.saved or 0, None
        for place in range(self.place, len(self)):
            self.place += 1
            yield place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.saved = state["place"]

    def update(self, batch: Any) -> None:
        pass


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "once": OrdersOnce,
    "eager": Eager,
    "lives": Lives,
    "draws": Draws,
    "keeps place": KeepsPlace,
    "takes place": TakesPlace,
    "shuffled": lambda dataset: SeededRandomSampler(dataset, seed=5),
    "in order": FileOrderSampler,
}


@cache
def run_of(total: int | None, epochs: int = 1, **changes: float) -> RunConfig:
    data = {"train_batch_size": BATCH, "dataloader_num_workers": 0, "shuffle": True, "seed": 5}
    options = {"total_training_steps": total, "total_epochs": epochs, "save_freq": 1} | changes
    return RunConfig.parse(OmegaConf.create({"data": data, "trainer": options}))


class Writes:
    """Workers that write a file."""

    def save_checkpoint(self, folder: str, remote: None, step: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "weights").touch()

    def load_checkpoint(self, folder: str, **options: Any) -> None:
        assert Path(folder, "weights").exists()


def trainer_of(
    folder: Path, sampler: str, growth: int = 0, total: int = 99, cls: type[RayPPOTrainer] = RayPPOTrainer
) -> Any:
    trainer: Any = cls.__new__(cls)
    trainer.run_config = run_of(total)
    trainer.state = RunState(seed=1, total_steps=total)
    trainer.train_dataset = Numbers(growth=growth)
    made = SAMPLERS[sampler](trainer.train_dataset)
    trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, trainer.train_dataset, None, made)
    controller = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    learners = {"train_dataset": trainer.train_dataset}
    groups: Any = {"actor": Writes()}
    trainer.checkpoints = Checkpoints(
        trainer.run_config, trainer.state, groups, trainer.train_dataloader, controller, learners
    )
    trainer.checkpoints.root = folder
    trainer.course = course_of(trainer)
    return trainer


def course_of(trainer: Any) -> Course:
    """Return the course of the run, as ``fit`` makes it; it validates and publishes nothing."""
    return Course(
        trainer.run_config,
        trainer.state,
        trainer.checkpoints,
        dict,
        trainer._save_checkpoint,
        lambda *arguments: None,
        trainer._may_end_before,
    )


class Batch(list):
    """Rows of a step, as far as these samplers read them."""

    non_tensor_batch: dict[str, Any] = {}

    def select(self) -> "Batch":
        return self


def learn(trainer: Any, batch: Batch) -> None:
    loaders.let_learn(trainer.train_dataloader, trainer.train_dataset, batch)


def steps(trainer: Any, until: int) -> dict[int, list[int]]:
    rows = trainer._training_rows()
    seen = {}
    while trainer.global_steps < until:
        trainer.course.begin_step()
        seen[trainer.global_steps] = next(rows)["x"].tolist()
        learn(trainer, Batch(seen[trainer.global_steps]))
    return seen


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=6, deadline=None)
@given(stop=st.integers(1, 12), again=st.integers(1, 6), growth=st.integers(0, 2))
def test_a_resumed_run_draws_the_rows_of_an_uninterrupted_one(
    tmp_path_factory: Any, sampler: str, stop: int, again: int, growth: int
) -> None:
    """Stops in the middle and at the end of passes; the second part of the run is stopped too."""
    growth = growth if sampler in ("shuffled", "in order") else 0
    folder = tmp_path_factory.mktemp("run")
    end = stop + again + 7
    whole = steps(trainer_of(folder, sampler, growth), end)
    first = trainer_of(folder, sampler, growth)
    seen = steps(first, stop)
    first.checkpoints.save()
    second = trainer_of(folder, sampler, growth)
    second.checkpoints.load(folder / f"global_step_{stop}")
    seen |= steps(second, stop + again)
    second.checkpoints.save()
    third = trainer_of(folder, sampler, growth)
    third.checkpoints.load(folder / f"global_step_{stop + again}")
    assert seen | steps(third, end) == whole
    assert third.state.epoch == (end - 1) // 5 or growth


# ---- rows that are made during the run


class Counts:
    """A generator that remembers how often it was asked."""

    def __init__(self, config: Any) -> None:
        self.config, self.calls = config, 0

    def generate(self, dataset: DynamicGenDataset) -> datasets.Dataset:
        self.calls += 1
        row = {"prompt": [{"role": "user", "content": f"made {self.calls}"}], "data_source": "sums"}
        row |= {"reward_model": {"style": "rule", "ground_truth": str(self.calls)}}
        return datasets.Dataset.from_list([row], features=dataset.dataframe.features)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.fixture
def generating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], DynamicGenDataset]:
    path = tmp_path / "rows.parquet"
    row = {"prompt": [{"role": "user", "content": "read"}], "data_source": "sums"}
    datasets.Dataset.from_list([row | {"reward_model": {"style": "rule", "ground_truth": "2"}}]).to_parquet(path)
    source = "import sys\nCounts = sys.modules[" + repr(__name__) + "].Counts\n"
    monkeypatch.setattr("verl.experimental.dynamic_dataset.dynamicgen_dataset.AbstractDataGenerator", Counts)
    module = tmp_path / "generator.py"
    module.write_text(source)
    node = {"max_prompt_length": 32, "datagen": {"path": str(module), "name": "Counts"}}
    return lambda: DynamicGenDataset(str(path), byte_tokenizer(), node)


def contents(dataset: DynamicGenDataset) -> list[str]:
    return [row["prompt"][0]["content"] for row in dataset.dataframe]


def test_a_checkpoint_holds_generated_rows(generating: Callable[[], DynamicGenDataset], tmp_path: Path) -> None:
    first = generating()
    for _ in range(2):
        first.on_batch_end()
    state = RunState(seed=1, step=2)
    run = RunConfig.parse(OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}}))

    def checkpoints(dataset: DynamicGenDataset) -> Checkpoints:
        sampler = SeededRandomSampler(dataset, seed=3)
        data = SimpleNamespace(loader_batch_size=2, dataloader_num_workers=0)
        loader = loaders.train_loader(data, 3, dataset, collate_fn, sampler)  # type: ignore[arg-type]
        controller: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        groups: Any = {"actor": Writes()}
        return Checkpoints(run, state, groups, loader, controller, {"train_dataset": dataset})

    checkpoints(first).save()
    second = generating()
    checkpoints(second).load(tmp_path / "global_step_2")
    assert contents(second) == contents(first) == ["read", "made 1", "made 2", "made 3"]
    second.on_batch_end()
    assert contents(second)[-1] == "made 4" and second[4]["reward_model"]["ground_truth"] == "4"


# ---- the order of the phases


def test_sampler_and_data_set_learn_before_the_checkpoint_also_in_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[Any] = []
    trainer: Any = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.state = RunState(seed=1, total_steps=2)
    trainer.run_config = RunConfig.parse(OmegaConf.create({"trainer": {"total_training_steps": 2}}))

    def note(name: str) -> Any:
        return lambda *arguments, **named: order.append((trainer.global_steps, name))

    sampler = SimpleNamespace(update=note("sampler"))
    trainer.train_dataloader = SimpleNamespace(sampler=sampler)
    trainer.train_dataset = SimpleNamespace(on_batch_end=note("data set"))
    names = {"_dump": "dump", "_finish_step": "record"}
    for method, name in names.items():
        monkeypatch.setattr(trainer, method, note(name), raising=False)
    trainer._watched = lambda timing: nullcontext()
    trainer._sync_before_generation = lambda timing: None
    course = SimpleNamespace(
        begin_step=trainer.state.begin_step,
        ends_after_first_validation=lambda: False,
        validate=note("validate"),
        save=note("save"),
        step_is_recorded=lambda: None,
    )
    trainer._run = lambda: nullcontext(course)
    trainer._training_rows = lambda: iter(())
    trainer.collect = lambda *arguments: DataProto()
    trainer._checked = lambda name, batch, *arguments: batch
    trainer.fit()
    learn = ["sampler", "data set"]
    assert order == [(step, name) for step in (1, 2) for name in ("dump", *learn, "validate", "save", "record")]


# ---- a batch that is drawn a step ahead, a step that the data do not fill


@pytest.mark.parametrize("sampler", ["once", "eager", "lives"])
@pytest.mark.parametrize("stop, total", [(1, 99), (3, 99), (5, 99), (4, 4)])
def test_a_resumed_run_draws_the_batches_ahead_by_what_the_sampler_knew_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, stop: int, total: int
) -> None:
    """Also after the last step of a run that is made longer, which draws nothing ahead."""
    monkeypatch.setattr("verl.trainer.asynchronous.scheduler._LOOK_S", 0.001)

    def make(folder: Path, total: int = 99) -> Any:
        trainer = driver.make_trainer(folder, resume_mode="auto", cls=OneStepOffRayTrainer, mode="one_step_off")
        trainer.state.total_steps = total
        prompts = driver.Prompts()
        made = SAMPLERS[sampler](prompts)
        trainer.train_dataloader = loaders.train_loader(trainer.run_config.data, 1, prompts, None, made)
        controller: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        groups: Any = {"actor": Writes()}
        trainer.checkpoints = Checkpoints(
            trainer.run_config, trainer.state, groups, trainer.train_dataloader, controller, {}
        )
        trainer.checkpoints.root = folder
        return trainer

    def run(trainer: Any, until: int) -> dict[int, list[int]]:
        rows = trainer._training_rows()
        seen = {}
        while trainer.global_steps < until:
            trainer.state.begin_step()
            trainer._sync_before_generation({})
            batch = trainer.collect(rows, {}, {})
            drawn = batch.non_tensor_batch["extra_info"][:: driver.SAMPLES]
            seen[trainer.global_steps] = [extra["index"] for extra in drawn]
            learn(trainer, Batch(seen[trainer.global_steps]))
            trainer.engine_number += 1
        return seen

    whole = make(tmp_path / "whole")
    expected = run(whole, 9)
    driver.end(whole)
    first = make(tmp_path / "parts", total)
    seen = run(first, stop)
    first._save_checkpoint()
    driver.end(first)
    second = make(tmp_path / "parts")

    def resume() -> int:
        second.checkpoints.load(tmp_path / "parts" / f"global_step_{stop}")
        return stop

    second.checkpoints.resume = resume
    second._load_checkpoint()
    assert seen | run(second, 9) == expected
    driver.end(second)


def test_a_longer_run_draws_again_what_a_step_that_was_not_full_had_drawn(tmp_path: Path) -> None:
    """Steps of two batches: five batches of one epoch fill two of them."""

    def make(epochs: int) -> Any:
        trainer = trainer_of(tmp_path, "shuffled")
        trainer.run_config = trainer.checkpoints.run = run_of(None, epochs)
        trainer.course = course_of(trainer)
        return trainer

    def run(trainer: Any) -> dict[int, list[list[int]]]:
        rows = trainer._training_rows()
        seen = {}
        try:
            while True:
                trainer.course.begin_step()
                seen[trainer.global_steps] = [next(rows)["x"].tolist(), next(rows)["x"].tolist()]
        except loaders.EndOfDataError as end:
            trainer.course.end_early(end)
        return seen

    whole = run(make(3))
    assert len(whole) == 7
    first = make(1)
    seen = run(first)
    second = make(3)
    second.checkpoints.load(tmp_path / "global_step_2")
    assert seen | run(second) == whole


class Scorer:
    """A reward function that remembers how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("asked_before", ["score", "infer", "shape", "the step"])
def test_a_step_that_sigterm_leaves_is_made_again(tmp_path: Path, monkeypatch: Any, asked_before: str) -> None:
    """With the rows, the spare prompts and the scorer that it had when it began."""
    asked: list[str] = []
    monkeypatch.setattr(course, "is_end_requested", lambda: bool(asked))

    def make() -> Any:
        trainer = trainer_of(tmp_path, "shuffled")
        trainer.run_config = trainer.checkpoints.run = run_of(99, save_freq=-1, save_on_sigterm_s=60)
        trainer.reward_fn = trainer.checkpoints.learners["reward_fn"] = Scorer()
        trainer.course = course_of(trainer)
        return trainer

    def ask(at: str) -> None:
        if asked_before == at:
            asked.append(at)

    def run(trainer: Any, until: int, asked_in: int = 0) -> dict[int, Any]:
        rows = trainer._training_rows()
        state, scorer = trainer.state, trainer.reward_fn
        seen = {}
        while state.step < until:
            if state.step + 1 == asked_in:
                ask("the step")
            with suppress(EndRequested), trainer.course.to_the_end():
                trainer.course.begin_step()
                drawn = next(rows)["x"].tolist(), state.spares_drawn, scorer.calls
                for name in ("generate", "score", "infer", "shape", "update"):
                    if state.step == asked_in:
                        ask(name)
                    trainer._checked(name, None, DataProto)
                    state.spares_drawn += name == "generate"
                    scorer.calls += name == "score"
                seen[state.step] = drawn
                learn(trainer, Batch(drawn[0]))
            if asked:
                break
        return seen

    whole = run(make(), 6)
    seen = run(make(), 6, asked_in=3)
    assert sorted(seen) == [1, 2] and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    asked.clear()
    second = make()
    second.checkpoints.load(tmp_path / "global_step_2")
    assert seen | run(second, 6) == whole


# ---- notices


class Forgets(AbstractCurriculumSampler):
    def __init__(self, data_source: Any, data_config: Any = None) -> None:
        self.size = len(data_source)

    def __iter__(self) -> Any:
        return iter(range(self.size))

    def update(self, batch: Any) -> None:
        pass


def test_what_a_resume_starts_anew_is_named(caplog: pytest.LogCaptureFixture) -> None:
    numbers = Numbers()
    for sampler in SAMPLERS.values():
        warn_of_lost_state(sampler(numbers), numbers)
    assert not caplog.text
    grows = SimpleNamespace(on_batch_end=None)
    warn_of_lost_state(Forgets(numbers), grows)
    assert "data.sampler: Forgets has no state_dict" in caplog.text
    assert "has on_batch_end and has no state_dict" in caplog.text
