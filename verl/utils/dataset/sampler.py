"""The order in which a training run sees its rows."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class SeededRandomSampler(Sampler[int]):
    """A fresh permutation each epoch, as a pure function of seed and epoch, resumable at any position.

    ``StatefulDataLoader`` keeps the state of the iterator, which holds seed, epoch and position. Of several replicas
    each takes every ``num_replicas``-th row: together they take what one alone would, batch by batch.
    """

    def __init__(self, data_source: Sized, seed: int | None = None, rank: int = 0, num_replicas: int = 1) -> None:
        self.data_source = data_source
        self.rank, self.num_replicas = rank, num_replicas
        self.seed = int(torch.seed() if seed is None else seed) % 2**63
        self.next_epoch = 0

    def __len__(self) -> int:
        return len(self.data_source) // self.num_replicas

    def __iter__(self) -> "SeededRandomIterator":
        return SeededRandomIterator(self)


class SeededRandomIterator(Iterator[int]):
    """One epoch: the next one, from when its first row is taken, since loaders make spare iterators."""

    def __init__(self, sampler: SeededRandomSampler) -> None:
        self.sampler = sampler
        self.epoch: int | None = None
        self.position = 0
        self.order: list[int] = []

    def _start(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.sampler.next_epoch = epoch + 1
        # the golden-ratio step keeps epoch 1 of seed 1 apart from epoch 0 of seed 2
        seed = (self.sampler.seed + epoch * 0x9E3779B97F4A7C15) % 2**63
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.sampler.data_source), generator=generator)
        kept = order[self.sampler.rank :: self.sampler.num_replicas]
        self.order = kept[: len(self.sampler)].tolist()

    def __next__(self) -> int:
        if self.epoch is None:
            self._start(self.sampler.next_epoch, 0)
        if self.position >= len(self.order):
            raise StopIteration
        self.position += 1
        return self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` needs to go on from here."""
        epoch = self.sampler.next_epoch if self.epoch is None else self.epoch
        return {"seed": self.sampler.seed, "epoch": epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.sampler.seed = state["seed"]
        self._start(state["epoch"], state["position"])
