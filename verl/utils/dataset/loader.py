"""A data loader that goes on from the state of another, whatever number of processes either has."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.utils.dataset.files import GivenRow
from verl.utils.sandbox.cores import usable_cores

State = dict[str, Any]
_SAMPLER_KEYS = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)
"""Keys of the sampler's state in the state of a loader, with processes and without."""


class ResumableLoader(StatefulDataLoader):
    """Load rows by their number; the state of a loader with another number of processes gives the same rows."""

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from the state of this loader, or of one with another number of processes."""
        if state_dict and _processes_of(state_dict) != self.num_workers:
            place = _Place.in_state(state_dict)
            if hasattr(self.dataset, "on_batch_end"):  # the driver has restored the state of such a data set
                place = replace(place, data=None)
            state_dict = place.for_processes(self.num_workers, self._draw_seed()) if self.num_workers else place.alone()
        super().load_state_dict(state_dict)

    def _draw_seed(self) -> int:
        """Return the seed that new processes would get."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())


def _processes_of(state: State) -> int:
    return int(state["_snapshot"]["_main_snapshot"]["_num_workers"]) if "_snapshot" in state else 0


@dataclass(frozen=True)
class _Place:
    """The position of a loader in its data, for any number of processes.

    Attributes: ``sampler`` is the state of the sampler, ``batches`` the number of batches that it has yielded,
        ``data`` the state of the data set if it has one, and ``is_at_end`` whether the epoch has ended.
    """

    sampler: State
    batches: int
    data: Any
    is_at_end: bool

    @classmethod
    def in_state(cls, state: State) -> Self:
        """Read the state of a loader."""
        if "_snapshot" not in state:
            sampler = {key: state[key] for key in _SAMPLER_KEYS}
            return cls(sampler, state["_num_yielded"], state["dataset_state"], state["_iterator_finished"])
        snapshot = state["_snapshot"]
        main = snapshot["_main_snapshot"]
        if state["_steps_since_snapshot"]:
            raise ValueError(
                f"the state of the data loader is older than its last batch: write data.dataloader_num_workers="
                f"{main['_num_workers']}, with which it was written"
            )
        # Each process has a data set; the one that made the last batch has seen most of it.
        process = snapshot["_worker_snapshots"][f"worker_{snapshot['_last_yielded_worker_id']}"]
        sampler = {key: main[key] for key in _SAMPLER_KEYS}
        return cls(sampler, snapshot["_snapshot_step"], process["dataset_state"], state["_iterator_finished"])

    def alone(self) -> State:
        """Return the state of a loader without processes at this position."""
        return self.sampler | {
            "_num_yielded": self.batches,
            "fetcher_state": None,
            "dataset_state": self.data,
            "_iterator_finished": self.is_at_end,
        }

    def for_processes(self, count: int, seed: int) -> State:
        """Return the state of a loader with ``count`` processes at this position; random numbers start at ``seed``."""
        processes = {
            f"worker_{number}": {"worker_id": number, "fetcher_state": None, "dataset_state": self.data}
            for number in range(count)
        }
        snapshot = {
            "_snapshot_step": self.batches,
            "_last_yielded_worker_id": count - 1,  # the next batch comes from the first process
            "_main_snapshot": self.sampler | {"_num_workers": count, "_base_seed": seed},
            "_worker_snapshots": processes,
        }
        return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": self.is_at_end}


def stateful_loader(dataset: Dataset[GivenRow], **options: Any) -> ResumableLoader:
    """Return a loader that can save and restore its position; ``options`` go to ``StatefulDataLoader``."""
    with warnings.catch_warnings():  # torchdata 0.11 calls a function that torch 2.13 deprecates
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return ResumableLoader(dataset=dataset, **options)


def loader_processes(wanted: int) -> int:
    """Return the number of processes of a loader: as wanted, but at most one per core of this process."""
    return min(wanted, len(usable_cores()))
