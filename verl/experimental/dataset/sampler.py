"""Base classes of custom samplers, which ``data.sampler.class_path`` and ``class_name`` select."""

import copy
import functools
import itertools
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, TypedDict, TypeVar

from torch.utils.data import Sampler

from verl.utils.dataset.factory import HasState, SavedState, has_state
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from verl.protocol import DataProto


T = TypeVar("T")


class PassState(TypedDict):
    begin: SavedState
    drawn: int


class AbstractSampler(Sampler[int]):
    """Yields row numbers of ``data_source``.

    A sampler that learns has ``state_dict`` and ``load_state_dict`` for its learned state. The position in a pass over
    the data may be part of that state; if it is not, checkpoints store the position separately.
    """

    def __init_subclass__(cls, **options: Json) -> None:
        super().__init_subclass__(**options)
        if "__iter__" in cls.__dict__:
            cls.__iter__ = _keeping_place(cls.__iter__)  # type: ignore[method-assign]

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Json]) -> None:
        """Take the data set and the ``data`` node."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each step which rows to yield next."""

    @abstractmethod
    def update(self, batch: "DataProto") -> None:
        """Take the batch of the step that has ended, with its scores."""


class Pass(Iterator[int]):
    """One pass over a sampler that has a state; the state of the pass is its position.

    The rest of a pass may follow from what the sampler knew when the pass began. So a resume starts the pass from the
    state of that time, skips the rows that were drawn, and then restores what the sampler has learned since.
    """

    def __init__(
        self, sampler: HasState, begin: SavedState, rows: Iterator[int], again: Callable[[], Iterator[int]]
    ) -> None:
        """Store the sampler's state before the pass, the rows of the pass, and a function that restarts the pass."""
        self._sampler = sampler
        self._begin = begin
        self._rows = rows
        self._again = again
        self._drawn = 0

    def __next__(self) -> int:
        row = next(self._rows)
        self._drawn += 1
        return row

    def state_dict(self) -> PassState:
        """Return the state of the sampler at the beginning of the pass, and the number of rows drawn since."""
        return {"begin": self._begin, "drawn": self._drawn}

    def load_state_dict(self, state: PassState) -> None:
        """Continue after the rows that were drawn. The sampler has had its latest state when this pass was made."""
        learned = self._begin
        self._begin = state["begin"]
        self._drawn = state["drawn"]
        self._sampler.load_state_dict(copy.deepcopy(self._begin))
        self._rows = self._again()
        skipped = sum(1 for _ in itertools.islice(self._rows, self._drawn))
        # A sampler may take its place from the state and only then make the pass, as those of torchdata do.
        makes_rest = skipped < self._drawn
        if makes_rest or pickle.dumps(self._sampler.state_dict()) != pickle.dumps(learned):
            self._sampler.load_state_dict(copy.deepcopy(learned))
        if makes_rest:
            self._rows = self._again()


def _keeping_place(method: Callable[[T], Iterator[int]]) -> Callable[[T], Iterator[int]]:
    """Let ``__iter__`` of a sampler with a state return a ``Pass``, unless its own iterator has a state."""

    @functools.wraps(method)
    def passes(self: T) -> Iterator[int]:
        again = functools.partial(method, self)
        if not has_state(self):
            return again()
        begin = copy.deepcopy(self.state_dict())  # the state may hold lists that change later
        rows = again()
        keeps_place = has_state(rows)
        return rows if keeps_place else Pass(self, begin, rows, again)

    return passes
