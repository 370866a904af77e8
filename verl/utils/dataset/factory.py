"""Data sets, samplers and loaders, built as the ``data`` node of the config describes them."""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.errors import MissingFile, MissingName, UserImportError, WrongInput, WrongSetting, WrongType
from verl.utils.dataset.config import DataConfig, Node, order_problem
from verl.utils.dataset.files import GivenRow
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_type

logger = logging.getLogger(__name__)
T = TypeVar("T")


def load_class(node: Node | None, key: str, base: type, names: tuple[str, str]) -> type | None:
    """Load the class that a node names by file and name; return None if the node names no file.

    Args:
        key: dotted key of the node.
        base: required base class.
        names: the keys in the node that hold the file and the class name.

    Raises: ValueError naming the key.
    """
    file_key, class_key = names
    if not node or not node.get(file_key):
        return None
    path = node[file_key]
    name = node.get(class_key)
    if not name:
        raise WrongInput(f"{key}.{class_key} must name a class in {path!r}, got {name!r}")
    try:
        found = load_extern_type(path, name)
    except (MissingFile, UserImportError, MissingName) as error:
        raise type(error)(f"{key}.{file_key}={path!r}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise WrongType(f"{key}.{class_key}={name!r} in {path!r} must be a class derived from {base.__name__}")
    return found


def create_rl_dataset(
    data_paths: str | list[str],
    data_config: Node,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    is_train: bool = True,
) -> Dataset[GivenRow]:
    """Build the prompt data set: a custom class, the generating one (training only), or ``RLHFDataset``."""
    cls: type | None = load_class(data_config.get("custom_cls"), "data.custom_cls", Dataset, ("path", "name"))
    datagen = data_config.get("datagen")
    if cls is None and is_train and datagen and datagen.get("path"):
        # verl.experimental is a higher layer, so it is loaded by name and only if the config asks for it.
        cls = load_extern_type("pkg://verl.experimental.dynamic_dataset.dynamicgen_dataset", "DynamicGenDataset")
    arguments: dict[str, Any] = {
        "data_files": data_paths,
        "tokenizer": tokenizer,
        "processor": processor,
        "config": data_config,
    }
    most = DataConfig.of_data_set(data_config).most_rows(is_train)
    if most >= 0:
        arguments["max_samples"] = most
    if cls is not None:
        _check_parameters(cls, arguments)
    return (cls or RLHFDataset)(**arguments)


def _check_parameters(cls: type, arguments: Mapping[str, Any]) -> None:
    """Check that a data set of the user takes the arguments of ``RLHFDataset``.

    Raises: WrongType.
    """
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        path = inspect.getfile(cls)
        raise WrongType(
            f"data.custom_cls.name={cls.__name__!r} in {path!r} cannot be called with {', '.join(arguments)}: {error}: "
            "give its __init__ these parameters"
        ) from error


def create_rl_sampler(data_config: Node, dataset: Dataset[GivenRow] | Sized) -> Sampler[int]:
    """Build the training sampler: a custom class, a seeded permutation per epoch, or file order."""
    assert isinstance(dataset, Sized), "a training set needs a length"
    settings = DataConfig.of_data_set(data_config)
    node = data_config.get("sampler")
    if node and node.get("class_path"):
        abstract = load_extern_type("pkg://verl.experimental.dataset.sampler", "AbstractSampler")
        cls = load_class(node, "data.sampler", abstract, ("class_path", "class_name"))
        assert cls is not None
        if settings.dataloader_num_workers != 0:
            raise WrongSetting(
                "data.dataloader_num_workers must be 0 with data.sampler: loader workers fetch rows before the "
                f"sampler has seen the last batch; got {settings.dataloader_num_workers}"
            )
        return cls(data_source=dataset, data_config=data_config)
    if settings.shuffle:
        return SeededRandomSampler(dataset, settings.seed)
    return FileOrderSampler(dataset)


class SavedState(Protocol):
    """The saved state of an object; only the object reads it."""


class HasState(Protocol):
    """An object that can save and restore its state."""

    def state_dict(self) -> SavedState:
        """Return the state of the object."""

    def load_state_dict(self, state: SavedState) -> None:
        """Continue from a state."""


def has_state(learner: T) -> TypeGuard[HasState]:
    """Whether an object can save and restore its state."""
    return hasattr(learner, "state_dict") and hasattr(learner, "load_state_dict")


def warn_of_lost_state(sampler: Sampler[int], dataset: T) -> None:
    """Warn once that a user's sampler or data set starts from scratch in a resumed run: it cannot save its state."""
    starts_anew = "has no state_dict and load_state_dict: a resumed run starts it from scratch"
    standard = isinstance(sampler, SequentialSampler | SeededRandomSampler)
    if not standard and not has_state(sampler) and not has_state(iter(sampler)):
        name = type(sampler).__name__
        logger.warning("data.sampler: %s %s and skips the rows that it had yielded", name, starts_anew)
    if hasattr(dataset, "on_batch_end") and not has_state(dataset):
        name = type(dataset).__name__
        logger.warning("data.custom_cls: %s has on_batch_end and %s", name, starts_anew)


def digest_of(dataset: Dataset[GivenRow]) -> str | None:
    """Return the digest of the rows of a data set; None if its class makes none."""
    digest: str | None = getattr(dataset, "rows_digest", None)
    return digest


def warn_of_other_data(saved: str | None, dataset: Dataset[GivenRow]) -> None:
    """Warn when the rows differ from the rows of the checkpoint, whose digest is ``saved``; None if it holds none."""
    if saved is not None and digest_of(dataset) not in (None, saved):
        logger.warning(
            "data.train_files: the rows, their order, or those that pass data.filter_overlong_prompts differ from the "
            "checkpoint's. The loader continues at its position, so this epoch may repeat rows and leave out others; "
            "to resume exactly, give the data of the checkpoint"
        )


def warn_of_other_batch_size(saved: int | None, batch_size: int) -> None:
    """Warn when the batch size differs from that of the checkpoint, ``saved``; None if it does not tell."""
    if saved not in (None, batch_size):
        logger.warning(
            "data.train_batch_size=%d, and was %d in the checkpoint: the loader continues at the next row, and the "
            "steps before count as they are, so that total_training_steps and the schedule of the learning rate mean "
            "another number of rows",
            batch_size,
            saved,
        )


def order_of(sampler: Sampler[int] | None) -> str | None:
    """Return the setting that chose the sampler of the training rows; None without a sampler."""
    if sampler is None:
        return None
    if isinstance(sampler, SeededRandomSampler):
        return "data.shuffle=true"
    if isinstance(sampler, FileOrderSampler):
        return "data.shuffle=false"
    return f"data.sampler.class_name={type(sampler).__name__}"


def check_order(saved: str | None, sampler: Sampler[int] | None) -> None:
    """Check that a sampler can go on from the state of the one that ``saved`` names; None if none was saved.

    Raises: WrongSetting with both settings.
    """
    own = order_of(sampler)
    problem = None if own is None else order_problem(saved, own)
    if problem is not None:
        raise WrongSetting(problem)


class FileOrderSampler(SequentialSampler):
    """Yield the rows in order, resumable at any position, also if the data set has grown since the pass began."""

    def __iter__(self) -> "FileOrderIterator":
        return FileOrderIterator(self)


class FileOrderIterator(Iterator[int]):
    """Iterate over the rows that the data set had when the pass began."""

    def __init__(self, sampler: SequentialSampler) -> None:
        self.position = 0
        self.num_rows = len(sampler)

    def __next__(self) -> int:
        if self.position >= self.num_rows:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of rows of the pass, and how many were read."""
        return {"position": self.position, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the rows that were read."""
        self.position = state["position"]
        self.num_rows = min(state["num_rows"], self.num_rows)  # the files may have changed


class SeededRandomSampler(Sampler[int]):
    """Draw a new permutation each epoch, as a pure function of seed and epoch, resumable at any position.

    ``StatefulDataLoader`` saves the state of the iterator: seed, epoch and position. Each of several replicas takes
    every ``num_replicas``-th row, so that together they read the batches that a single sampler would. All replicas
    have the same state, from which any other number of replicas can continue.
    """

    def __init__(self, data_source: Sized, seed: int | None = None, rank: int = 0, num_replicas: int = 1) -> None:
        self.data_source = data_source
        self.rank = rank
        self.num_replicas = num_replicas
        self.is_seeded = seed is not None
        self.seed = int(torch.seed() if seed is None else seed) % 2**63
        self.next_epoch = 0

    def __len__(self) -> int:
        return len(self.data_source) // self.num_replicas

    def __iter__(self) -> "SeededRandomIterator":
        return SeededRandomIterator(self)


class SeededRandomIterator(Iterator[int]):
    """Iterate over one epoch, which has the rows of the data set at its start.

    The epoch is chosen at the first row, not at construction: loaders create iterators that they never use.
    """

    def __init__(self, sampler: SeededRandomSampler) -> None:
        self.sampler = sampler
        self.epoch: int | None = None
        self.position = 0
        self.num_rows = len(sampler.data_source)
        self.order: list[int] = []

    def _start(self, epoch: int, position: int, num_rows: int) -> None:
        self.epoch = epoch
        self.num_rows = num_rows
        self.position = position
        self.sampler.next_epoch = epoch + 1
        # The golden-ratio step keeps epoch 1 of seed 1 apart from epoch 0 of seed 2.
        seed = (self.sampler.seed + epoch * 0x9E3779B97F4A7C15) % 2**63
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_rows, generator=generator)
        kept = order[self.sampler.rank :: self.sampler.num_replicas]
        self.order = kept[: num_rows // self.sampler.num_replicas].tolist()

    def __next__(self) -> int:
        if self.epoch is None:
            self._start(self.sampler.next_epoch, 0, len(self.sampler.data_source))
        if self.position >= len(self.order):
            raise StopIteration
        self.position += 1
        return self.order[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, number of rows in the epoch, rows read by each replica, and number of replicas."""
        epoch = self.sampler.next_epoch if self.epoch is None else self.epoch
        state = {"seed": self.sampler.seed, "epoch": epoch, "position": self.position, "num_rows": self.num_rows}
        return state | {"num_replicas": self.sampler.num_replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the rows that all replicas together have read.

        Raises: WrongInput when these rows cannot be shared evenly.
        """
        replicas = self.sampler.num_replicas
        saved = state.get("num_replicas", replicas)  # checkpoints of older versions hold neither of the two
        size = len(self.sampler.data_source)
        num_rows = min(state.get("num_rows", size), size)  # the files may have changed
        rows = state["position"] * saved
        if rows % replicas:
            raise WrongInput(
                f"the checkpoint was written after {rows} rows of an epoch, which {replicas} data-parallel ranks "
                f"cannot share evenly: start {saved} data-parallel ranks, or set trainer.resume_mode=disable"
            )
        if self.sampler.is_seeded and self.sampler.rank == 0 and self.sampler.seed != state["seed"]:
            words = "the seed of the order of the rows is %d, and was %d in the checkpoint, whose order goes on"
            logger.warning(words, self.sampler.seed, state["seed"])
        self.sampler.seed = state["seed"]
        self._start(state["epoch"], rows // replicas, num_rows)
