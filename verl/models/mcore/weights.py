"""Map Megatron-Core tensors to checkpoint tensors and shard them over tensor-parallel ranks, in both directions.

A rule belongs to one Megatron-Core parameter. ``load`` reads only this rank's part of the checkpoint tensors.
``export`` takes the parts of all ranks and returns the checkpoint tensors. Names may hold ``{layer}`` and ``{expert}``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ReadPart = Callable[[str, Sequence[int], tuple[slice, ...]], Tensor]
"""(checkpoint name, expected shape of the whole tensor, slices of its leading dims) -> that part of it."""


@dataclass(frozen=True)
class Shard:
    """Part ``rank`` of ``size`` tensor-parallel parts."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """Return the slice of ``length`` items that is this part; ``size`` must divide ``length``."""
        assert length % self.size == 0, f"{length} items cannot be split into {self.size} equal parts"
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


class Rule(ABC):
    """Maps one Megatron-Core tensor to the checkpoint tensors ``names``."""

    names: tuple[str, ...]
    shard_dim: int | None = 0
    """The dim that tensor parallelism shards; None for a replicated tensor."""

    @abstractmethod
    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        """Return this rank's part, which must have ``shape``."""

    @abstractmethod
    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """Return the checkpoint tensors in the order of ``names``, possibly views of the parts.

        Args: ``parts`` holds the parts of all ranks, as a sequence or as one tensor (ranks, ...).
        """


def _joined(parts: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(parts, Tensor):
        return parts.flatten(0, 1)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class _OneTensor(Rule):
    name: str

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)


@dataclass(frozen=True)
class Whole(_OneTensor):
    """Replicated: every rank holds the whole tensor."""

    shard_dim = None

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], shape, ())

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Columns(_OneTensor):
    """Sharded by output features: dim 0, of length ``rows``, of a weight or bias."""

    rows: int

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], (self.rows, *shape[1:]), (shard.of(self.rows),))

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [_joined(parts)]


@dataclass(frozen=True)
class Rows(_OneTensor):
    """Sharded by input features: dim 1, of length ``columns``, of a weight."""

    columns: int
    shard_dim = 1

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], (shape[0], self.columns), (slice(None), shard.of(self.columns)))

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [torch.cat(list(parts), dim=1)]


@dataclass(frozen=True)
class Vocabulary(_OneTensor):
    """Sharded by tokens, padded with zeros to equal parts; ``export`` drops the padding."""

    vocab_size: int

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
    """Several projections of ``rows`` output features, such as gate and up, sharded one by one and concatenated."""

    names: tuple[str, ...]
    rows: int

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        whole = (self.rows, *shape[1:])
        return torch.cat([read(name, whole, (shard.of(self.rows),)) for name in names])

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        pieces = [part.chunk(len(self.names)) for part in parts]
        return [_joined([piece[i] for piece in pieces]) for i in range(len(self.names))]


@dataclass(frozen=True)
class QueryKeyValue(Rule):
    """Query, key and value interleaved by group: the queries of a key-value head, then its key, then its value.

    It applies to weights and biases. Ranks hold whole groups.
    """

    names: tuple[str, ...]
    num_heads: int
    num_groups: int
    head_dim: int

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        rest = shape[1:]
        lengths = [heads * self.head_dim for heads in (self.num_heads, self.num_groups, self.num_groups)]
        parts = [read(name, (length, *rest), (shard.of(length),)) for name, length in zip(names, lengths, strict=True)]
        groups = self.num_groups // shard.size
        return torch.cat([part.reshape(groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        rest = parts[0].shape[1:]
        whole = _joined(parts).reshape(self.num_groups, -1, *rest)
        per_group = self.num_heads // self.num_groups * self.head_dim
        cut = whole.split([per_group, self.head_dim, self.head_dim], dim=1)
        return [t.reshape(-1, *rest) for t in cut]
