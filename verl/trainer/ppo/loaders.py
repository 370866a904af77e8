"""Data sets and loaders of the trainer, and the batches that they give."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import open_dict
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.ppo.steps import loader_batch_size
from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler, stateful_loader
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.numerics.seeding import seed_process

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class EmptyLoaderError(ValueError, AssertionError):
    """There is not one whole batch of data."""


class EndOfDataError(RuntimeError):
    """The last pass over the training data is over, and the steps drew more than one batch each."""


def build_dataset(trainer: "RayPPOTrainer", key: str, is_train: bool) -> Dataset:
    """Build the data set of ``data.<key>``."""
    data = trainer.config.data
    return create_rl_dataset(data[key], data, trainer.tokenizer, trainer.processor, is_train=is_train)


def train_loader(
    config: Any, seed: int, dataset: Dataset, collate_fn: Callable[..., Any] | None, sampler: Sampler | None
) -> StatefulDataLoader:
    """Return the loader of whole training batches, in the order of the sampler.

    Raises: EmptyLoaderError when there is not one.
    """
    data, size = config.data, loader_batch_size(config)
    loader = stateful_loader(
        dataset,
        batch_size=size,
        drop_last=True,
        sampler=sampler or create_rl_sampler(data, dataset),
        num_workers=data.dataloader_num_workers,
        collate_fn=collate_fn or default_collate_fn,
        generator=torch.Generator().manual_seed(seed),
    )
    if not len(loader):
        raise EmptyLoaderError(
            f"data.train_files has {len(dataset)} usable rows, fewer than one batch of data.train_batch_size={size}"
        )
    return loader


def validation_loader(
    data: Any, seed: int, dataset: Dataset, collate_fn: Callable[..., Any] | None
) -> StatefulDataLoader:
    """Return the loader of the validation set, by default in one batch.

    Raises: EmptyLoaderError when the set has no row.
    """
    if not len(dataset):
        raise EmptyLoaderError("data.val_files has no usable row")
    return stateful_loader(
        dataset,
        batch_size=data.val_batch_size or len(dataset),
        shuffle=data.validation_shuffle,
        drop_last=False,
        num_workers=data.dataloader_num_workers,
        collate_fn=collate_fn or default_collate_fn,
        generator=torch.Generator().manual_seed(seed),
    )


def follow_run_seed(config: Any) -> None:
    """Let the order of the data follow ``trainer.seed`` where ``data.seed`` is null."""
    if config.data.get("seed") is None:
        with open_dict(config):
            config.data.seed = config.trainer.seed


def follow_rollout(config: Any) -> None:
    """Let the data set know what the rollout engine takes: how many images, and how its processor is called."""
    rollout = config.actor_rollout_ref.rollout
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    with open_dict(config):
        config.data.limit_images = rollout.get("limit_images")
        for name in ("limit_mm_per_prompt", "mm_processor_kwargs"):
            config.data[name] = engine.get(name)


def training_rows(trainer: "RayPPOTrainer") -> Iterator[Mapping[str, Any]]:
    """Yield the batches of the training loader, epoch after epoch, and keep ``trainer.epoch``.

    Each is drawn from a random state of its own: that of the step, and of how many prompts it has drawn before.

    Raises: EndOfDataError after ``total_epochs``, where no number of steps was given; EmptyLoaderError where the
        loader yields nothing.
    """
    options, fruitless = trainer.config.trainer, 0
    while options.total_training_steps is not None or trainer.epoch < options.total_epochs:
        drawn = 0
        _seed_draw(trainer)
        for rows in trainer.train_dataloader:
            drawn += 1
            yield rows
            _seed_draw(trainer)
        trainer.epoch += 1
        # A loader resumed at the end of an epoch yields nothing at first.
        fruitless = 0 if drawn else fruitless + 1
        if fruitless > 1:
            raise EmptyLoaderError("the training loader yields no batch: its sampler or data set has become empty")
    raise EndOfDataError(f"the training data have been gone through {trainer.epoch} times (trainer.total_epochs)")


def _seed_draw(trainer: "RayPPOTrainer") -> None:
    before = (trainer.prompts_drawn,) if trainer.prompts_drawn else ()
    seed_process(trainer.run_seed, "driver", trainer.global_steps, *before)
