"""Map Megatron-Core tensors to checkpoint tensors and shard them over tensor-parallel ranks, in both directions.

A rule belongs to one Megatron-Core parameter. ``load`` reads only this rank's part of the checkpoint tensors.
``export`` takes the parts of all ranks and returns the checkpoint tensors. Names may hold ``{layer}`` and ``{expert}``.

Some checkpoints hold the experts of a layer in one tensor, stacked along dim 0. Rules know single experts, under names
as ``experts.3.down_proj``. ``reading_stacks`` and ``stacked`` translate to the names and tensors of the checkpoint.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """Return the rule for a checkpoint with other names."""
        changed: Any = replace(self, names=tuple(map(rename, self.names)))  # type: ignore[type-var]
        return changed


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

    def renamed(self, rename: Callable[[str], str]) -> Self:
        return replace(self, name=rename(self.name))


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


# Experts that a checkpoint holds stacked, each of them transposed


@dataclass(frozen=True)
class TransposedStacked(_OneTensor):
    """``count`` projections of ``rows`` output features, side by side in one tensor (input, count * rows)."""

    count: int
    rows: int

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        mine = shard.of(self.rows)
        whole = (shape[1], self.count * self.rows)
        starts = [at * self.rows for at in range(self.count)]
        places = [slice(start + mine.start, start + mine.stop) for start in starts]
        return torch.cat([read(names[0], whole, (slice(None), place)) for place in places], dim=1).T

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        pieces = [part.chunk(self.count) for part in parts]
        return [torch.cat([_joined([piece[i] for piece in pieces]) for i in range(self.count)]).T]


@dataclass(frozen=True)
class TransposedRows(_OneTensor):
    """Sharded by input features: dim 0, of length ``columns``, of a transposed weight."""

    columns: int
    shard_dim = 1

    def load(self, read: ReadPart, shard: Shard, names: Sequence[str], shape: torch.Size) -> Tensor:
        return read(names[0], (self.columns, shape[0]), (shard.of(self.columns),)).T

    def export(self, parts: Sequence[Tensor] | Tensor) -> list[Tensor]:
        return [torch.cat(list(parts), dim=1).T]


_OF_STACK = re.compile(r"(?P<before>.+\.experts\.)(?P<expert>\d+)\.(?P<part>gate_up_proj|down_proj)")


_STACK = re.compile(r".+\.experts\.(?:gate_up_proj|down_proj)")


def is_stack(name: str) -> bool:
    """Return whether a tensor of a checkpoint holds the experts of a layer."""
    return _STACK.fullmatch(name) is not None


def is_of_stack(name: str) -> bool:
    """Return whether a tensor belongs to one expert of a stack."""
    return _OF_STACK.fullmatch(name) is not None


def name_in_checkpoint(name: str) -> str:
    """Return the name of the tensor of a checkpoint that holds this one: a stack, or itself."""
    found = _OF_STACK.fullmatch(name)
    return name if found is None else found["before"] + found["part"]


def reading_stacks(read: ReadPart, num_experts: int, shapes: Mapping[str, Sequence[int]]) -> ReadPart:
    """Return a function that reads single experts from the stacks of a checkpoint, and other tensors as they are.

    Published stacks are transposed, but stacks that transformers 5 has saved are not; ``shapes`` tell them apart.
    """

    def read_part(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        found = _OF_STACK.fullmatch(name)
        if found is None:
            return read(name, shape, part)
        stack = found["before"] + found["part"]
        expert = slice(int(found["expert"]), int(found["expert"]) + 1)
        rows, columns = shape
        if tuple(shapes.get(stack, ())) != (num_experts, columns, rows):
            return read(stack, (num_experts, rows, columns), (expert, *part)).squeeze(0)
        of_rows, of_columns = (*part, slice(None))[:2]
        return read(stack, (num_experts, columns, rows), (expert, of_columns, of_rows)).squeeze(0).T

    return read_part


def stacked(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) with single experts stacked as published checkpoints hold them, and other tensors as are."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        found = _OF_STACK.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        stack = found["before"] + found["part"]
        experts = waiting.setdefault(stack, {})
        experts[int(found["expert"])] = tensor
        if len(experts) == num_experts:
            del waiting[stack]
            yield stack, torch.stack([experts[expert] for expert in range(num_experts)])
