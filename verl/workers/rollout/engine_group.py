"""The workers of the trainer that share an engine."""

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.utils.failures import settle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_FOR_EVER = timedelta(days=365)  # between steps the other ranks wait for the leader, all through training


def engine_group(size: int) -> "ProcessGroup | None":
    """Return a group of the ranks that share this rank's engine, None for one; collective over all ranks."""
    if size == 1:
        return None
    world = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    mine = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks, timeout=_FOR_EVER, backend="gloo")
        if rank in ranks:
            mine = group
    return mine


class EngineGroup:
    """The ranks that share an engine; the first rank leads, and the methods are collective over the ranks.

    Args: ``size`` is their number. The constructor is collective over all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._group = engine_group(size)
        self.rank = 0 if self._group is None else torch.distributed.get_rank(self._group)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one."""
        return self.rank == 0

    def by_leader(self, work: Callable[[], T]) -> T:
        """Run a function on the leader; return its result, or raise its error, on all ranks."""
        if self._group is None:
            return work()
        if self.leads:
            outcome: Future[T] = Future()
            settle(outcome, work)
            error = outcome.exception()
            told = [outcome.result(), None] if error is None else [None, f"{type(error).__name__}: {error}"]
            torch.distributed.broadcast_object_list(told, group=self._group, group_src=0)
            return outcome.result()
        box: list[Any] = [None, None]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        if box[1] is not None:
            raise RuntimeError(f"the first worker of this engine: {box[1]}")
        found: T = box[0]
        return found

    def gathered(self, make: Callable[[], T]) -> list[T]:
        """Return the results of all ranks, in rank order; raise if one rank failed."""
        if self._group is None:
            return [make()]
        failure: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (make(), None)
        except Exception as error:  # the others wait for this rank
            failure = error
            mine = (None, f"{type(error).__name__}: {error}")
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, mine, group=self._group)
        errors = [f"worker {rank} of this engine: {error}" for rank, (_, error) in enumerate(found) if error]
        if errors:
            raise RuntimeError("; ".join(errors)) from failure
        return [value for value, _ in found]
