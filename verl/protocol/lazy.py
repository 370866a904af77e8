"""Columns by reference: the rows of a column lie in the object store, and a process reads the rows that it needs.

``by_reference`` puts the columns of a batch into the store, in blocks of rows, and replaces each by a ``LazyTensor``.
This is a tensor with shape and dtype, and every operation of DataProto accepts it. Choosing, ordering, repeating and
joining rows moves only their addresses. Sums over the last dim and digests are known, because they are computed where
the column is stored. Any other operation reads the column first, with a log line and a count of its bytes
(``take_touched``), and gives what it would give for a plain tensor. Writing changes the column, and the one that it is
a slice of, as usual.

Ray moves a lazy column as addresses. Any other pickle holds its values.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from verl.protocol.data_proto import DataProto
from verl.utils.batch.serialization import PicklesItself, TensorTriple, serialize_single_tensor
from verl.utils.observe.digest import digest_of_rows, row_digests

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)
_log_once = cache(logger.warning)
T = TypeVar("T")


class Block(dict[str, TensorTriple]):
    """Some rows of several columns, as the object store holds them: dtype, shape and bytes of each column."""

    # Blocks are compared and hashed by identity, as references to blocks are.

    def __eq__(self, other: T) -> bool:
        return self is other

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


BlockRef: TypeAlias = "ObjectRef[Block] | Block | int"
"""A block: its reference, in tests the block itself, in the answer of a task its number."""
Operand: TypeAlias = "Tensor | Sequence[Tensor] | int | float | bool | None"
"""An argument of an operation of torch."""
Answer = Tensor | bool | None
"""The answer of an operation; None leaves it to the values."""

Index = int | slice | Tensor | None | tuple[int | slice | Tensor | None, ...]

BY_REFERENCE = "columns_by_reference"
"""``meta_info`` key: workers leave the columns of their answer in the object store."""
BLOCK_BYTES = 8 << 20
"""Size up to which a block takes further rows."""

_aten = torch.ops.aten
_OWN_MODULES = ("torch", "tensordict", "verl.protocol", "verl.utils.tensordict_utils", "verl.utils.py_functional")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
"""Operations that read shape and dtype of a column only."""
_UNKNOWN_TO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_touched: dict[str, int] = {}


class Rows:
    """The places of rows in the store: blocks, and for each row its block and its place in it, both (B,) int32.

    Columns that are chosen or joined together share one object, so a message holds it once.
    """

    def __init__(self, blocks: Sequence[BlockRef], block: np.ndarray, row: np.ndarray) -> None:
        self.blocks = tuple(blocks)
        self.block = block
        self.row = row
        # Caches the results of operations on these rows for the next column. The references are weak, because rows keep
        # their blocks alive.
        self._made: weakref.WeakValueDictionary[Hashable, Rows] = weakref.WeakValueDictionary()
        self._parts: Sequence[weakref.ref[Rows]] = ()

    def take(self, rows: slice | np.ndarray) -> "Rows":
        """Return the places of some of the rows."""
        # As one type, because the bytes of [1, 0] in int32 are those of [1] in int64.
        key = (rows.start, rows.stop, rows.step) if isinstance(rows, slice) else rows.astype(np.int64).tobytes()
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = Rows(self.blocks, self.block[rows], self.row[rows])
        return made

    @staticmethod
    def joined(parts: "Sequence[Rows]") -> "Rows":
        """Return the places of the rows of all parts."""
        key = ("joined", *map(id, parts))
        made = parts[0]._made.get(key)
        if made is not None and all(of() is part for of, part in zip(made._parts, parts, strict=True)):
            return made
        number: dict[BlockRef, int] = {}
        numbers: dict[int, np.ndarray] = {}  # parts of one batch have the same tuple of blocks
        for part in parts:
            if id(part.blocks) not in numbers:
                found = [number.setdefault(each, len(number)) for each in part.blocks]
                numbers[id(part.blocks)] = np.array(found, dtype=np.int32)
        block = [numbers[id(part.blocks)][part.block] for part in parts]
        made = Rows(tuple(number), np.concatenate(block), np.concatenate([part.row for part in parts]))
        made._parts = [weakref.ref(part) for part in parts]
        parts[0]._made[key] = made
        return made

    def used(self) -> "tuple[tuple[BlockRef, ...], np.ndarray, np.ndarray]":
        """Return the blocks that hold one of the rows, and for each row the number of its block and its place."""
        numbers, block = np.unique(self.block, return_inverse=True)
        return tuple(self.blocks[at] for at in numbers), block.astype(np.int32).reshape(-1), self.row

    def __reduce__(self) -> "tuple[type[Rows], tuple[tuple[BlockRef, ...], np.ndarray, np.ndarray]]":
        return Rows, self.used()


@dataclass(frozen=True)
class Places:
    """The places of a column's values in the object store, with sums and digests of the values.

    Attributes:
        sums: the sum of each row over the last dim, (B,); None unless the column has two dims.
        digests: the digest of each row, (B,) uint64; None if ``window`` leaves out a part of the rows.
        window: start and end of the part that this column takes of each row in the blocks; None for whole rows.
    """

    rows: Rows
    sums: np.ndarray | None
    digests: np.ndarray | None
    window: tuple[int, int] | None = None

    def take(self, rows: slice | np.ndarray) -> "Places":
        """Return the places of some rows."""
        sums = None if self.sums is None else self.sums[rows]
        digests = None if self.digests is None else self.digests[rows]
        return replace(self, rows=self.rows.take(rows), sums=sums, digests=digests)

    def within(self, first: int, last: int) -> "Places":
        """Return the places of some of the columns."""
        start = 0 if self.window is None else self.window[0]
        return replace(self, sums=None, digests=None, window=(start + first, start + last))

    @staticmethod
    def joined(parts: "Sequence[Places]") -> "Places":
        """Return the places of the rows of all parts."""
        sums = [part.sums for part in parts if part.sums is not None]
        digests = [part.digests for part in parts if part.digests is not None]
        return Places(
            Rows.joined([part.rows for part in parts]),
            np.concatenate(sums) if len(sums) == len(parts) else None,
            np.concatenate(digests) if len(digests) == len(parts) else None,
            parts[0].window,
        )


class LazyTensor(Tensor, PicklesItself):
    """A column whose rows lie in the object store, until an operation needs them in this process."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, name: str, places: Places, row_shape: Sequence[int], dtype: torch.dtype) -> "LazyTensor":
        """Return a column of as many rows as there are places."""
        size = (len(places.rows.row), *row_shape)
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        return made

    def __init__(self, name: str, places: Places, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.column = name
        self.places = places
        self._value: Tensor | None = None
        self._written = False
        self._whole: tuple[LazyTensor, tuple[slice, ...]] | None = None

    # ---- rows

    def _at(self, places: Places) -> "LazyTensor":
        return LazyTensor(self.column, places, self.shape[1:], self.dtype)

    def _rows(self, rows: slice) -> "LazyTensor":
        """Return rows that stay part of this column, as a view of a tensor does."""
        part = self._at(self.places.take(rows))
        # A write through the part must reach the column, as through a view of torch.
        part._whole = (self, (rows,))
        return part

    def _window(self, first: int, last: int) -> "LazyTensor":
        """Return some of the columns, which stay part of this column."""
        shape = (last - first, *self.shape[2:])
        part = LazyTensor(self.column, self.places.within(first, last), shape, self.dtype)
        part._whole = (self, (slice(None), slice(first, last)))
        return part

    # ---- values

    @property
    def is_known(self) -> bool:
        """Whether this process has the values."""
        return self._value is not None or (self._whole is not None and self._whole[0].is_known)

    @property
    def is_written(self) -> bool:
        """Whether this process has changed the values, so that the store holds older ones."""
        return self._written or (self._whole is not None and self._whole[0].is_written)

    def _known(self) -> Tensor | None:
        if self._whole is not None and self._whole[0].is_known:
            whole = self._whole[0]._known()
            assert whole is not None
            return whole[self._whole[1]]
        return self._value

    def fetched(self, blocks: Mapping[BlockRef, Block] | None = None) -> Tensor:
        """Return the values as a plain tensor that the caller owns, without a log line.

        ``blocks`` are the blocks that the caller has read.
        """
        known = self._known()
        if known is not None:
            return known.clone()
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        rows = self.places.rows
        found = read_blocks(rows.used()[0]) if blocks is None else blocks
        width = int(np.prod(self.shape[2:], dtype=np.int64)) * self.dtype.itemsize
        out = np.empty((*self.shape[:2], width), dtype=np.uint8)
        # Rows are copied as bytes: one copy serves all dtypes, also those that NumPy does not have.
        first, last = (0, self.shape[1]) if self.places.window is None else self.places.window
        breaks = np.flatnonzero((np.diff(rows.block) != 0) | (np.diff(rows.row) != 1)) + 1
        for start, stop in pairwise([0, *breaks.tolist(), len(rows.row)]):  # rows that lie one after the other
            _, shape, data = found[rows.blocks[rows.block[start]]][self.column]
            stored = np.asarray(data).reshape(*shape[:2], width)
            out[start:stop] = stored[rows.row[start] : rows.row[stop - 1] + 1, first:last]
        return torch.from_numpy(out.reshape(-1)).view(self.dtype).view(self.shape)

    def touched(self) -> Tensor:
        """Return the values for an operation of this process; the first time they are read, logged and counted."""
        known = self._known()
        if known is None:
            self._value = known = self.fetched()
            _count(self.column, known)
            _log_once(
                "column %r is read by the driver: %s reads %d bytes, %s of %s; "
                "trainer.lazy_columns keeps columns in the object store until a process needs them",
                *(self.column, _caller(), known.nbytes, tuple(self.shape), self.dtype),
            )
        return known

    def _to_write(self) -> Tensor:
        """Return the values, which the caller changes."""
        if self._whole is not None:
            return self._whole[0]._to_write()[self._whole[1]]
        self._written = True
        return self.touched()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload[..., T],
        types: Sequence[type],
        args: tuple[Operand, ...] = (),
        kwargs: dict[str, Operand] | None = None,
    ) -> T | Answer:
        """Answer from the addresses if possible, else from the values."""
        options = kwargs or {}
        addressed = _ADDRESSED.get(func)
        answer = None if addressed is None else addressed(*args, **options)
        if answer is not None:
            return answer
        arguments = func._schema.arguments
        # An operation that changes an argument must change the column itself, for which its schema tells the argument.
        written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
        named = dict(zip((each.name for each in arguments), args, strict=False)) | options
        read = _shape_only if func._schema.name.removeprefix("aten::") in _LIKE else _plain
        values = {name: tree_map(_plain_to_write if name in written else read, each) for name, each in named.items()}
        result = func(**values)
        changed = args[0] if args and arguments[0].name in written else None
        return changed if isinstance(changed, cls) else result

    # ---- operations that bypass torch's dispatcher

    def __setitem__(self, rows: Index, values: Tensor | float) -> None:  # type: ignore[override]
        """Write to the column."""
        self._to_write()[rows] = _plain(values)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values as an array."""
        return self._to_write().numpy(force=force)  # the caller may write to it

    def __array__(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Return the values as an array."""
        values = self.touched().numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def tolist(self) -> list[Any]:
        """Return the values as lists."""
        found: list[Any] = self.touched().tolist()
        return found

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        return f"LazyTensor({self.column!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        """Return a copy that shares no values."""
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle the values: outside of Ray the addresses mean nothing."""
        return self.touched().__reduce_ex__(protocol)


def _plain(value: T) -> T | Tensor:
    return value.touched() if isinstance(value, LazyTensor) else value


def _shape_only(value: T) -> T | Tensor:
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if isinstance(value, LazyTensor) else value


def _plain_to_write(value: T) -> T | Tensor:
    return value._to_write() if isinstance(value, LazyTensor) else value


def _caller() -> str:
    """Return file and line of the code that made torch read a column."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OWN_MODULES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown code"


# ---- operations on addresses


def _slice(x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Answer:
    # Written values are in this process only, so a slice by addresses would have the old values.
    if dim % x.dim() > 1 or x.is_written:
        return None
    first, last, step = slice(start, end, step).indices(x.shape[dim % x.dim()])
    if dim % x.dim() == 0:
        return x._rows(slice(first, last, step))
    return x._window(first, max(first, last)) if step == 1 else None


def _select(x: LazyTensor, dim: int, index: int) -> Answer:
    """Return one row, and fetch only its block."""
    if dim % x.dim() or x.is_known:
        return None
    at = index % len(x)
    return x._rows(slice(at, at + 1)).touched()[0]


def _index_select(x: Tensor, dim: int, index: Tensor) -> Answer:
    return None if dim % x.dim() else _index(x, [index])


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Answer:
    index = indices[0]
    if not isinstance(x, LazyTensor) or len(indices) != 1 or index is None or isinstance(index, LazyTensor):
        return None
    if x.is_written or index.dim() != 1 or (index.dtype == torch.bool and len(index) != len(x)):
        return None
    rows = index.nonzero().flatten() if index.dtype == torch.bool else index
    count = len(x)
    if len(rows) and (int(rows.min()) < -count or int(rows.max()) >= count):
        return None  # let torch raise its own error
    return x._at(x.places.take(rows.cpu().numpy() % max(count, 1)))


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Answer:
    lazy = [part for part in parts if isinstance(part, LazyTensor) and not part.is_written]
    if len(lazy) < len(parts) or dim % lazy[0].dim():
        return None
    if len({(part.column, part.shape[1:], part.dtype, part.places.window) for part in lazy}) > 1:
        return None
    return lazy[0]._at(Places.joined([part.places for part in lazy]))


def _alias(x: LazyTensor) -> Answer:
    return x._rows(slice(0, len(x)))


def _clone(x: LazyTensor, memory_format: torch.memory_format | None = None) -> Answer:
    return None if x.is_written else x._at(x.places)


def _sum(
    x: LazyTensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Answer:
    if x.is_known or x.places.sums is None or dtype is not None or not dims or [dim % 2 for dim in dims] != [1]:
        return None
    sums = torch.from_numpy(x.places.sums.copy())
    return sums.unsqueeze(1) if keepdim else sums


def _equal(x: Tensor, y: Tensor) -> Answer:
    if not isinstance(x, LazyTensor) or not isinstance(y, LazyTensor) or x.is_written or y.is_written:
        return None
    if x.places.digests is None or y.places.digests is None:
        return None
    return x.shape == y.shape and x.dtype == y.dtype and bool((x.places.digests == y.places.digests).all())


_ADDRESSED: dict[OpOverload[..., Any], Callable[..., Answer]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.index_select.default: _index_select,
    _aten.index.Tensor: _index,
    _aten.cat.default: _cat,
    _aten.alias.default: _alias,
    _aten.detach.default: _alias,
    _aten.clone.default: _clone,
    _aten.sum.dim_IntList: _sum,
    _aten.equal.default: _equal,
}


# ---- batches


def is_lazy(data: DataProto) -> bool:
    """Whether a batch has a column by reference."""
    return data.batch is not None and any(isinstance(value, LazyTensor) for value in data.batch.values())


def lazy_columns(data: DataProto) -> dict[str, LazyTensor]:
    """Return the columns by reference."""
    columns = {} if data.batch is None else dict(data.batch.items())
    return {str(name): value for name, value in columns.items() if isinstance(value, LazyTensor)}


def by_reference(
    data: DataProto, put: "Callable[[Block], BlockRef] | None" = None, block_bytes: int | None = None
) -> DataProto:
    """Return the batch with its dense tensors of two or more dims in the object store.

    A block holds some rows of all these columns. The process that calls this owns the blocks: they are lost with it.
    Columns of one number per row, arrays and jagged tensors stay.

    Args: ``put`` stores a block and returns its reference, by default ``ray.put``; ``block_bytes`` is the size up to
        which a block takes further rows, by default ``BLOCK_BYTES``.
    """
    if data.batch is None:
        return data
    store = _ray_put() if put is None else put
    leaving = {str(name): value for name, value in data.batch.items() if isinstance(value, Tensor)}
    columns = {name: _plain(value).contiguous() for name, value in leaving.items() if _may_leave(value)}
    count = len(data)
    stored = data.select()
    if not columns or not count:
        return stored
    assert stored.batch is not None
    row_bytes = sum(value[0].numel() * value.element_size() for value in columns.values())
    most = BLOCK_BYTES if block_bytes is None else block_bytes
    size = max(1, min(count, most // max(1, row_bytes)))
    blocks = [
        store(Block({name: serialize_single_tensor(value[at : at + size]) for name, value in columns.items()}))
        for at in range(0, count, size)
    ]
    number = np.arange(count, dtype=np.int32)
    rows = Rows(blocks, number // size, number % size)
    for name, value in columns.items():
        sums = value.sum(-1).numpy() if value.dim() == 2 and value.dtype not in _UNKNOWN_TO_NUMPY else None
        stored.batch[name] = LazyTensor(name, Places(rows, sums, row_digests(value)), value.shape[1:], value.dtype)
    return stored


def _may_leave(value: Tensor) -> bool:
    if isinstance(value, LazyTensor):
        return value.is_written
    return value.dim() >= 2 and not value.is_nested and value.layout == torch.strided and value.device.type == "cpu"


def fetched(data: DataProto, counted: bool = False) -> DataProto:
    """Return the batch with the values of its columns by reference; each block is read once.

    With ``counted``, ``take_touched`` counts them.
    """
    lazy = lazy_columns(data)
    if not lazy:
        return data
    unknown = [column for column in lazy.values() if not column.is_known]
    blocks = read_blocks({block for rows in {column.places.rows for column in unknown} for block in rows.used()[0]})
    whole = data.select()
    assert whole.batch is not None
    for name, column in lazy.items():
        whole.batch[name] = values = column.fetched(blocks)
        if counted:
            _count(name, values)
    return whole


def _count(name: str, values: Tensor) -> None:
    _touched[name] = _touched.get(name, 0) + values.numel() * values.element_size()


def digest_of(column: Tensor, order: Sequence[int] | None = None) -> str:
    """Return the digest of a column of two or more dims, with rows in the given order, from the digests of its rows."""
    digests = None
    if isinstance(column, LazyTensor) and not column.is_written:
        digests = column.places.digests
    if digests is None:
        digests = row_digests(_plain(column))
    return digest_of_rows(column.dtype, column.shape, digests if order is None else digests[list(order)])


def read_blocks(references: "Iterable[BlockRef]") -> "dict[BlockRef, Block]":
    """Return blocks by their references; the bytes stay in the memory of the object store."""
    wanted = list(references)
    remote = [each for each in wanted if not isinstance(each, Block | int)]
    found: dict[BlockRef, Block] = {each: each for each in wanted if isinstance(each, Block)}
    if remote:
        import ray

        found |= zip(remote, ray.get(remote), strict=True)
    return found


Formula = Callable[[DataProto], DataProto]
"""A plain function of some columns of a batch; ``meta_info`` has its options. Other processes import it by its name."""


class Workers(Protocol):
    """A worker group: the registered methods of its workers are attributes."""

    def __getattr__(self, name: str) -> Callable[[Formula, DataProto], DataProto]:
        """Return a method; one that computes a formula is ``execute_func_rank_zero``."""


def computed(
    formula: Formula,
    data: DataProto,
    columns: Iterable[str],
    arrays: Iterable[str] = (),
    group: Workers | None = None,
    **options: T,
) -> DataProto:
    """Compute a formula of some columns in this process if it has them all, else on the first worker of ``group``.

    The formula sees all rows in both cases. Without a group this process reads the columns.

    Args: ``columns`` and ``arrays`` name what the formula reads; names that the batch lacks are left out. ``options``
        become the ``meta_info`` of the formula's batch.
    """
    assert data.batch is not None
    known = {str(name) for name in data.batch.keys()}
    names = [name for name in dict.fromkeys(columns) if name in known]
    part = data.select(names, [name for name in arrays if name in data.non_tensor_batch], [])
    part.meta_info = options
    if group is None or all(column.is_known for column in lazy_columns(part).values()):
        return formula(part)
    part.meta_info = {**options, BY_REFERENCE: True}
    return group.execute_func_rank_zero(formula, part)


def take_touched() -> dict[str, int]:
    """Return the bytes of each column that operations of this process have read since the last call."""
    bytes_by_column = dict(_touched)
    _touched.clear()
    return bytes_by_column


# ---- Ray


def _ray_put() -> "Callable[[Block], ObjectRef[Block]]":
    import ray

    register_with_ray()
    return ray.put


@cache
def register_with_ray() -> None:
    """Let Ray move lazy columns as addresses; once in each process that sends any."""
    import ray

    ray.util.register_serializer(LazyTensor, serializer=_address, deserializer=_column)


Address = tuple[str, Places, tuple[int, ...], torch.dtype]


def _address(column: LazyTensor) -> Address | Tensor:
    """Return the address of a column for a message, or its values if this process has changed them."""
    if column.is_written:
        return column.fetched()
    return column.column, column.places, tuple(column.shape[1:]), column.dtype


def _column(address: Address | Tensor) -> Tensor:
    if isinstance(address, Tensor):
        return address
    import ray

    if ray.is_initialized():  # only then can the batch be sent to other processes
        register_with_ray()
    return LazyTensor(*address)
