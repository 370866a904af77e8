"""How a tensor of Megatron-Core is made of checkpoint tensors and cut over tensor-parallel ranks, in both directions.

A rule belongs to one Megatron-Core parameter. ``load`` reads no more than this rank's part of the checkpoint tensors;
``export`` takes the parts of all ranks and returns the checkpoint tensors. Names may hold ``{layer}`` and ``{expert}``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ReadPart = Callable[[str, Sequence[int], tuple[slice, ...]], Tensor]
"""(checkpoint name, shape that the whole tensor must have, slices of its leading dims) -> that part of it."""


@dataclass(frozen=True)
class Shard:
    """Which of ``size`` tensor-parallel parts."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """Return this part of ``length`` items, which the parts divide evenly."""
        assert length % self.size == 0, f"{length} items cannot be cut into {self.size} equal parts"
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


class Rule(ABC):
    """A correspondence between one Megatron-Core tensor and ``names`` of a checkpoint."""

    names: tuple[str, ...]
    shard_dim: int | None = 0
    """The dim that tensor parallelism cuts; None for a tensor that every rank holds whole."""

    @abstractmethod
    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        """Return this rank's part, which must have ``shape``."""

    @abstractmethod
    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """Return the checkpoint tensors, in the order of ``names``, from the parts of all ranks.

        They may be views of the parts, which may stand in one tensor (ranks, ...).
        """


def _joined(parts: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(parts, Tensor):
        return parts.flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Whole(Rule):
    """Every rank holds all of it."""

    name: str
    shard_dim = None

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], shape, ())

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Columns(Rule):
    """Output features are cut: dim 0 of a weight or bias. ``rows`` is its length."""

    name: str
    rows: int

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], (self.rows, *shape[1:]), (shard.of(self.rows),))

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [_joined(parts)]


@dataclass(frozen=True)
class Rows(Rule):
    """Input features are cut: dim 1 of a weight. ``columns`` is its length."""

    name: str
    columns: int
    shard_dim = 1

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], (shape[0], self.columns), (slice(None), shard.of(self.columns)))

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [torch.cat(list(parts), dim=1)]


@dataclass(frozen=True)
class Vocabulary(Rule):
    """Tokens are cut; zeros pad them to equal parts, and do not leave the rank."""

    name: str
    vocab_size: int

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        step = -(-self.vocab_size // shard.size)
        first = min(shard.rank * step, self.vocab_size)
        mine = slice(first, min(first + step, self.vocab_size))
        rows = read(names[0], (self.vocab_size, *shape[1:]), (mine,))
        padding = rows.new_zeros(step - len(rows), *rows.shape[1:])
        return torch.cat([rows, padding]) if len(padding) else rows

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [_joined(parts)[: self.vocab_size]]


@dataclass(frozen=True)
class Stacked(Rule):
    """Several projections in one, each cut by output features: gate and up. All have ``rows``."""

    parts: tuple[str, ...]
    rows: int

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.parts

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        whole = (self.rows, *shape[1:])
        return torch.cat([read(name, whole, (shard.of(self.rows),)) for name in names])

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        pieces = [part.chunk(len(self.parts)) for part in parts]
        return [_joined([piece[i] for piece in pieces]) for i in range(len(self.parts))]


@dataclass(frozen=True)
class QueryKeyValue(Rule):
    """Query, key and value in one, group by group: the queries of a key-value head, then its key, then its value.

    Weights and biases alike. Ranks hold whole groups.
    """

    query: str
    key: str
    value: str
    num_heads: int
    num_groups: int
    head_dim: int

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.query, self.key, self.value)

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        rest, lengths = (
            shape[1:],
            [heads * self.head_dim for heads in (self.num_heads, self.num_groups, self.num_groups)],
        )
        parts = [read(name, (length, *rest), (shard.of(length),)) for name, length in zip(names, lengths, strict=True)]
        groups = self.num_groups // shard.size
        return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        rest = parts[0].shape[1:]
        whole = _joined(parts).reshape(self.num_groups, -1, *rest)
        per_group = self.num_heads // self.num_groups * self.head_dim
        cut = whole.split([per_group, self.head_dim, self.head_dim], dim=1)
        return [t.reshape(-1, *rest) for t in cut]
