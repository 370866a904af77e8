"""The order of rows over epochs and resumes, and the classes that the config can name."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.experimental.dynamic_dataset.dynamicgen_dataset import DynamicGenDataset
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.factory import SeededRandomSampler, create_rl_dataset, create_rl_sampler
from verl.utils.dataset.loader import stateful_loader
from verl.utils.dataset.rl_dataset import collate_fn

CONFIG = {"max_prompt_length": 16, "filter_overlong_prompts": False, "seed": 3}


def loader(dataset, workers, seed=3):
    sampler = create_rl_sampler({"seed": seed, "shuffle": True}, dataset)
    return StatefulDataLoader(dataset, 4, num_workers=workers, drop_last=True, collate_fn=collate_fn, sampler=sampler)


@pytest.fixture
def dataset(tokenizer, parquet, row):
    rows = [row(extra_info={"index": i, "split": "train"}) for i in range(22)]
    return RLHFDataset(parquet(rows), tokenizer, CONFIG)


def orders(loader, epochs):
    return [[batch["index"].tolist() for batch in loader] for _ in range(epochs)]


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize(("workers", "epoch", "batches"), [(0, 0, 2), (0, 1, 3), (0, 0, 5), (2, 1, 3), (1, 0, 5)])
def test_a_resumed_loader_goes_on_with_the_same_batches(dataset, workers, epoch, batches):
    whole = orders(loader(dataset, 0), 3)
    running = loader(dataset, workers)
    for current in range(epoch + 1):
        for number, _ in enumerate(running, start=1):
            if current == epoch and number == batches:
                state = running.state_dict()
                break
    resumed = loader(dataset, workers, seed=99)  # the seed comes from the state
    resumed.load_state_dict(state)
    rest = [batch["index"].tolist() for batch in resumed]
    assert rest == whole[epoch][batches:]
    assert orders(resumed, 1)[0] == whole[epoch + 1]


class Growing(torch.utils.data.Dataset):
    """Has a state: how many rows this copy has been asked for."""

    asked = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.asked += 1
        return index, self.asked

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


class Backwards(torch.utils.data.Sampler):
    """A sampler of the user that has no state: a resume skips the rows that it had yielded."""

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(reversed(range(40)))


def draw(loader, count):
    """Draw so many batches, from as many epochs as it takes."""
    batches = (batch for epoch in itertools.repeat(loader) for batch in epoch)
    return list(itertools.islice(batches, count))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("sampler", [partial(SeededRandomSampler, range(40), seed=3), Backwards])
@pytest.mark.parametrize("numbers", [(8, 2, 0), (0, 3, 1), (2, 2, 2)])
def test_a_resume_with_other_numbers_of_processes_reads_the_same_rows(sampler, numbers):
    """The loaders stop within the first epoch, at its end, and within the second."""

    def make(processes):
        options = {"batch_size": 4, "sampler": sampler(), "collate_fn": list, "drop_last": True}
        return stateful_loader(Growing(), num_workers=processes, **options)

    whole = [[row for row, _ in batch] for batch in draw(make(0), 17)]
    state: dict = {}
    drawn = []
    for processes, batches in zip(numbers, (3, 7, 7), strict=True):
        loader = make(processes)
        loader.load_state_dict(state)
        drawn += draw(loader, batches)
        state = loader.state_dict()
    assert [[row for row, _ in batch] for batch in drawn] == whole
    assert drawn[3][0][1] > 1  # the data set went on from its state


class Learning(Growing):
    on_batch_end = None  # the driver tells it of each step, and saves its state


def test_what_a_data_set_has_learned_is_not_replaced_by_the_copy_of_a_process():
    options = {"batch_size": 4, "sampler": SeededRandomSampler(range(40), seed=3), "collate_fn": list}
    running = stateful_loader(Learning(), num_workers=1, **options)
    next(iter(running))
    restored = Learning()
    restored.load_state_dict({"asked": 100})
    resumed = stateful_loader(restored, num_workers=0, **options)
    resumed.load_state_dict(running.state_dict())
    assert [asked for _, asked in next(iter(resumed))] == [101, 102, 103, 104]


def test_a_state_that_lags_behind_its_batches_keeps_its_number_of_processes():
    options = {"batch_size": 4, "sampler": SeededRandomSampler(range(40), seed=3), "collate_fn": list}
    lagging = stateful_loader(Growing(), num_workers=1, snapshot_every_n_steps=3, **options)
    next(iter(lagging))
    with pytest.raises(ValueError, match=r"write data\.dataloader_num_workers=1"):
        stateful_loader(Growing(), num_workers=0, **options).load_state_dict(lagging.state_dict())


def test_epochs_and_seeds_differ_and_repeat(dataset):
    first, second = orders(loader(dataset, 0), 2)
    assert first != second
    assert sorted(i for batch in first for i in batch) == sorted({i for batch in first for i in batch})
    assert orders(loader(dataset, 0), 2) == [first, second]
    assert orders(loader(dataset, 0, seed=4), 1) != [first]
    assert sorted(SeededRandomSampler(range(10), seed=1)) == list(range(10))
    assert list(SeededRandomSampler(range(99))) != list(SeededRandomSampler(range(99)))  # unseeded


def test_replicas_take_the_batches_of_one(dataset):
    whole = list(SeededRandomSampler(dataset, seed=5))
    parts = [list(SeededRandomSampler(dataset, seed=5, rank=rank, num_replicas=4)) for rank in range(4)]
    assert [len(part) for part in parts] == [5] * 4  # 22 rows: the last two are left out
    for at in range(5):
        assert [part[at] for part in parts] == whole[4 * at : 4 * at + 4]


def replica(dataset, rank, replicas, rows=12):
    sampler = SeededRandomSampler(dataset, seed=5, rank=rank, num_replicas=replicas)
    return stateful_loader(dataset, batch_size=rows // replicas, sampler=sampler, drop_last=True, collate_fn=list)


@pytest.mark.parametrize("workers_after", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("workers_before", [1, 2, 4])
def test_other_numbers_of_replicas_continue_at_the_same_row(workers_before, workers_after):
    dataset = list(range(50))
    whole = list(replica(dataset, 0, 1))
    loaders = [replica(dataset, rank, workers_before) for rank in range(workers_before)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    resumed = [replica(dataset, rank, workers_after) for rank in range(workers_after)]
    for rank, loader in enumerate(resumed):
        loader.load_state_dict(states[rank % workers_before])
    batches = [sorted(sum(parts, [])) for parts in zip(*resumed, strict=True)]
    assert batches == [sorted(batch) for batch in whole[1:]]


def test_a_position_that_replicas_cannot_share_is_refused():
    dataset = list(range(50))
    state = iter(SeededRandomSampler(dataset, seed=5)).state_dict() | {"position": 7}
    resumed = iter(SeededRandomSampler(dataset, seed=5, rank=1, num_replicas=2))
    with pytest.raises(ValueError, match="after 7 rows of an epoch, which 2 data-parallel ranks cannot share"):
        resumed.load_state_dict(state)


def test_sampler_without_shuffling(dataset):
    sampler = create_rl_sampler({"shuffle": False}, dataset)
    assert isinstance(sampler, SequentialSampler) and list(sampler) == list(range(22))


CUSTOM = """
from torch.utils.data import Dataset
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.experimental.dynamic_dataset.dynamicgen_dataset import MockDataGenerator
class Hardest(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.order = list(range(len(data_source)))
    def __iter__(self):
        return iter(self.order)
    def __len__(self):
        return len(self.order)
    def update(self, batch):
        self.order.sort(key=lambda i: batch.scores[i])
class Mine(Dataset):
    def __init__(self, data_files, tokenizer, processor, config):
        self.made_of = data_files, tokenizer, processor, config
not_a_class = 3
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "custom.py"
    path.write_text(CUSTOM)
    return str(path)


def test_curriculum_sampler(dataset, custom):
    config = {"sampler": {"class_path": custom, "class_name": "Hardest"}, "dataloader_num_workers": 0}
    sampler = create_rl_sampler(config, dataset)
    assert isinstance(sampler, AbstractCurriculumSampler) and isinstance(sampler, AbstractSampler)
    sampler.update(SimpleNamespace(scores=[-i for i in range(22)]))
    assert list(sampler) == list(range(22))[::-1]
    with pytest.raises(AssertionError, match=r"data\.dataloader_num_workers must be 0 with data\.sampler.*got 8"):
        create_rl_sampler({"sampler": config["sampler"]}, dataset)
    with pytest.raises(TypeError, match=r"data\.sampler\.class_name='Mine'.*derived from AbstractSampler"):
        create_rl_sampler({"sampler": {"class_path": custom, "class_name": "Mine"}}, dataset)


def test_dataset_classes(tokenizer, parquet, row, custom):
    path = parquet([row()])
    mine = create_rl_dataset(path, {"custom_cls": {"path": custom, "name": "Mine"}}, tokenizer, None)
    assert mine.made_of[:3] == (path, tokenizer, None)
    assert type(create_rl_dataset(path, CONFIG, tokenizer, None)) is RLHFDataset
    for name, error in (("not_a_class", TypeError), ("Absent", AttributeError)):
        with pytest.raises(error, match=name):
            create_rl_dataset(path, {"custom_cls": {"path": custom, "name": name}}, tokenizer, None)
    with pytest.raises(ValueError, match=r"data\.custom_cls\.name must name a class"):
        create_rl_dataset(path, {"custom_cls": {"path": custom, "name": None}}, tokenizer, None)


def test_generated_rows(tokenizer, parquet, row, custom):
    config = {**CONFIG, "datagen": {"path": custom, "name": "MockDataGenerator"}, "return_full_prompt": True}
    path = parquet([row("a"), row("b")])
    dataset = create_rl_dataset(path, config, tokenizer, None)
    assert isinstance(dataset, DynamicGenDataset) and len(dataset) == 3
    dataset.on_batch_end()
    assert [dataset[i]["full_prompts"][8] for i in range(4)] == ["a", "b", "a", "a"]
    assert dataset.where(1).endswith("row 1") and dataset.where(3) == "generated row 1"
    sampler = create_rl_sampler(config, dataset)
    assert sorted(sampler) == [0, 1, 2, 3]
    assert type(create_rl_dataset(path, config, tokenizer, None, is_train=False)) is RLHFDataset
    with pytest.raises(TypeError, match=r"data\.datagen\.name='Mine'"):
        create_rl_dataset(path, {**config, "datagen": {"path": custom, "name": "Mine"}}, tokenizer, None)


def test_only_the_first_rows_are_read(tokenizer, parquet, row):
    files = [parquet([row("a"), row("b")], "a.parquet"), parquet([row("c"), row("d")], "b.parquet")]
    config = {**CONFIG, "return_full_prompt": True, "train_max_samples": 3, "val_max_samples": 1}

    def texts(is_train, **changes):
        dataset = create_rl_dataset(files, config | changes, tokenizer, None, is_train)
        return [dataset[i]["full_prompts"][8] for i in range(len(dataset))], dataset.rows_digest

    assert [*texts(True)[0], *texts(False)[0]] == ["a", "b", "c", "a"]
    assert texts(True, train_max_samples=-1)[0] == texts(True, train_max_samples=9)[0] == ["a", "b", "c", "d"]
    assert texts(True)[1] != texts(True, train_max_samples=-1)[1]
