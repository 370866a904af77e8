"""Columns by reference: the rows of a column lie in the object store, and a process reads the rows that it needs.

``by_reference`` puts the columns of a batch into the store, in blocks of rows, and leaves a ``LazyTensor`` of each.
That is a tensor: it has shape and dtype, and every verb of DataProto takes it. Choosing, ordering, repeating and
joining rows moves only their addresses. Sums over the last dim and digests are known, because they are computed where
the column is stored. Any other operation reads the column first, with a log line and a count of its bytes
(``take_touched``), and gives what it would give for a plain tensor. Writing changes the column, and the one that it is
a slice of, as usual.

Ray moves a lazy column as addresses. Any other pickle holds its values.
"""

import logging
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from verl.protocol.data_proto import DataProto
from verl.utils.batch.serialization import (
    PicklesItself,
    TensorTriple,
    deserialize_single_tensor,
    serialize_single_tensor,
)
from verl.utils.observe.digest import digest_of_rows, row_digests

logger = logging.getLogger(__name__)
_log_once = cache(logger.warning)

Block = dict[str, TensorTriple]
"""Some rows of several columns, as the object store holds them: dtype, shape and bytes of each column."""

BY_REFERENCE = "columns_by_reference"
"""``meta_info`` key: workers leave the columns of their answer in the object store."""
BLOCK_BYTES = 8 << 20
"""Size up to which a block takes further rows."""

_aten = torch.ops.aten
_OWN_MODULES = ("torch", "tensordict", "verl.protocol", "verl.utils.tensordict_utils", "verl.utils.py_functional")
_touched: dict[str, int] = {}


@dataclass(frozen=True)
class Places:
    """Where the rows of a column lie.

    Attributes:
        blocks: references of blocks, or in tests the blocks themselves.
        block, row: number of the block of each row, and of the row in it, (B,) int32.
        sums: the sum of each row over the last dim, (B,); None unless the column has two dims.
        digests: the digest of each row, (B,) uint64; None for some of the columns of a column.
        window: first and last column, of those in the blocks; None for all.
    """

    blocks: tuple[Any, ...]
    block: np.ndarray
    row: np.ndarray
    sums: Tensor | None
    digests: np.ndarray | None
    window: tuple[int, int] | None = None

    def take(self, rows: slice | np.ndarray) -> "Places":
        """Return the places of some rows."""
        sums = None if self.sums is None else self.sums[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        digests = None if self.digests is None else self.digests[rows]
        return Places(self.blocks, self.block[rows], self.row[rows], sums, digests, self.window)

    def used(self) -> "Places":
        """Return the same places with only the blocks that hold one of the rows."""
        numbers, block = np.unique(self.block, return_inverse=True)
        blocks = tuple(self.blocks[number] for number in numbers)
        return replace(self, blocks=blocks, block=block.astype(np.int32).reshape(-1))

    def within(self, first: int, last: int) -> "Places":
        """Return the places of some of the columns."""
        start = 0 if self.window is None else self.window[0]
        return replace(self, sums=None, digests=None, window=(start + first, start + last))

    @staticmethod
    def joined(parts: "Sequence[Places]") -> "Places":
        """Return the places of the rows of all parts."""
        blocks: dict[Hashable, Any] = {}
        number: dict[Hashable, int] = {}
        block = []
        numbers: dict[int, np.ndarray] = {}  # parts of one batch have the same tuple of blocks
        for part in parts:
            if id(part.blocks) not in numbers:
                for each in part.blocks:
                    number.setdefault(_identity(each), len(number))
                    blocks.setdefault(_identity(each), each)
                known = np.array([number[_identity(each)] for each in part.blocks], dtype=np.int32)
                numbers[id(part.blocks)] = known
            known = numbers[id(part.blocks)]
            block.append(known[part.block] if len(known) else part.block)
        sums = [part.sums for part in parts if part.sums is not None]
        digests = [part.digests for part in parts if part.digests is not None]
        return Places(
            tuple(blocks.values()),
            np.concatenate(block),
            np.concatenate([part.row for part in parts]),
            torch.cat(sums) if len(sums) == len(parts) else None,
            np.concatenate(digests) if len(digests) == len(parts) else None,
            parts[0].window,
        )


def _identity(block: Any) -> Hashable:
    return id(block) if isinstance(block, dict) else block


class LazyTensor(Tensor, PicklesItself):
    """A column whose rows lie in the object store, until an operation needs them in this process."""

    column: str
    places: Places
    _value: Tensor | None
    _written: bool
    _whole: "tuple[LazyTensor, tuple[slice, ...]] | None"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, name: str, places: Places, row_shape: Sequence[int], dtype: torch.dtype) -> "LazyTensor":
        """Return a column of as many rows as there are places."""
        size = (len(places.row), *row_shape)
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        return made

    def __init__(self, name: str, places: Places, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.column = name
        self.places = places
        self._value = None
        self._written = False
        self._whole = None

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
        """Return some of the columns, likewise."""
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

    def fetched(self, blocks: Mapping[Hashable, Block] | None = None) -> Tensor:
        """Return the values as a plain tensor that the caller owns, without a log line.

        ``blocks`` are the blocks that the caller has read.
        """
        known = self._known()
        if known is not None:
            return known.clone()
        found = read_blocks(self.places.used().blocks) if blocks is None else blocks
        dtype = self.dtype
        width = int(np.prod(self.shape[2:], dtype=np.int64)) * dtype.itemsize
        out = np.empty((*self.shape[:2], width), dtype=np.uint8)
        # Rows are copied as bytes: one copy serves all dtypes, also those that NumPy does not have.
        first, last = (0, self.shape[1]) if self.places.window is None else self.places.window
        for rows, block, start, stop in _runs(self.places):
            _, shape, data = found[_identity(self.places.blocks[block])][self.column]
            out[rows] = np.asarray(data).reshape(*shape[:2], width)[start:stop, first:last]
        if not out.size:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(out.reshape(-1)).view(dtype).view(self.shape)

    def touched(self) -> Tensor:
        """Return the values for an operation of this process; the first time they are read, logged and counted."""
        known = self._known()
        if known is None:
            self._value = known = self.fetched()
            size = known.numel() * known.element_size()
            _count(self.column, known)
            _log_once(
                "column %r is read by the driver: %s reads %d bytes, %s of %s; "
                "trainer.lazy_columns keeps columns in the object store until a process needs them",
                *(self.column, _caller(), size, tuple(self.shape), self.dtype),
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
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from the addresses if possible, else from the values."""
        options = kwargs or {}
        addressed = _ADDRESSED.get(func)
        if addressed is not None:
            answer = addressed(*args, **options)
            if answer is not NotImplemented:
                return answer
        # An operation that changes an argument must change the column itself, for which its schema tells the argument.
        schema = func._schema
        if not schema.is_mutable:
            return func(*tree_map(_plain, args), **tree_map(_plain, options))
        written = {at for at, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write}
        names = {schema.arguments[at].name for at in written}
        given = [
            tree_map(_plain_to_write, each) if at in written else tree_map(_plain, each) for at, each in enumerate(args)
        ]
        result = func(
            *given,
            **{name: tree_map(_plain_to_write if name in names else _plain, each) for name, each in options.items()},
        )
        first = args[0] if args else None
        return first if 0 in written and isinstance(first, cls) else result

    # ---- operations that bypass torch's dispatcher

    def __setitem__(self, rows: Any, values: Any) -> None:
        """Write to the column."""
        self._to_write()[rows] = _plain(values)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values as an array."""
        return self._to_write().numpy(force=force)  # the caller may write to it

    def __array__(self, dtype: Any = None) -> np.ndarray:
        """Return the values as an array."""
        values = self.touched().numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def tolist(self) -> list[Any]:
        """Return the values as lists."""
        found: list[Any] = self.touched().tolist()
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({self.column!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy that shares no values."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values: outside of Ray the addresses mean nothing."""
        values: Any = self.touched()
        return values.__reduce_ex__(protocol)


def _runs(places: Places) -> Iterable[tuple[slice, int, int, int]]:
    """Yield stretches of rows that lie one after the other in one block: their rows, block, first row and its end."""
    count = len(places.row)
    if not count:
        return
    # A stretch ends where the next row lies in another block or is not the one after.
    breaks = np.flatnonzero((np.diff(places.block) != 0) | (np.diff(places.row) != 1)) + 1
    bounds = [0, *breaks.tolist(), count]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        first = int(places.row[start])
        yield slice(start, stop), int(places.block[start]), first, first + stop - start


def _plain(value: Any) -> Any:
    return value.touched() if isinstance(value, LazyTensor) else value


def _plain_to_write(value: Any) -> Any:
    return value._to_write() if isinstance(value, LazyTensor) else value


def _caller() -> str:
    """Return file and line of the code that made torch read a column."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_OWN_MODULES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown code"


# ---- operations on addresses; NotImplemented leaves the answer to the values


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    # Values that were written are only here, so the addresses would answer with older ones.
    if dim % x.dim() > 1 or x.is_written:
        return NotImplemented
    first, last, step = slice(start, end, step).indices(x.shape[dim % x.dim()])
    if dim % x.dim() == 0:
        return x._rows(slice(first, last, step))
    return x._window(first, max(first, last)) if step == 1 else NotImplemented


def _select(x: Any, dim: int, index: int) -> Any:
    """Return one row: it is read alone."""
    if dim % x.dim() or x.is_known:
        return NotImplemented
    at = index % len(x)
    return x._rows(slice(at, at + 1)).touched()[0]


def _take(x: Any, index: Any) -> Any:
    if x.is_written or not isinstance(index, Tensor) or index.dim() != 1:
        return NotImplemented
    rows = index.nonzero().flatten() if index.dtype == torch.bool else index
    count = len(x)
    if len(rows) and (int(rows.min()) < -count or int(rows.max()) >= count):
        return NotImplemented  # torch says it best
    return x._at(x.places.take(rows.cpu().numpy() % max(count, 1)))


def _index_select(x: Any, dim: int, index: Any) -> Any:
    return NotImplemented if dim % x.dim() else _take(x, index)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    if not isinstance(x, LazyTensor) or len(indices) != 1 or isinstance(indices[0], LazyTensor):
        return NotImplemented
    if indices[0] is not None and indices[0].dtype == torch.bool and len(indices[0]) != len(x):
        return NotImplemented
    return _take(x, indices[0])


def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    first = parts[0]
    if not all(isinstance(part, LazyTensor) and not part.is_written for part in parts) or dim % first.dim():
        return NotImplemented
    if len({(part.column, part.shape[1:], part.dtype, part.places.window) for part in parts}) > 1:
        return NotImplemented
    return first._at(Places.joined([part.places for part in parts]))


def _alias(x: Any) -> Any:
    return x._rows(slice(0, len(x)))


def _clone(x: Any, **options: Any) -> Any:
    return NotImplemented if x.is_written else x._at(x.places)


def _sum(x: Any, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if x.is_known or x.places.sums is None or dtype is not None or not dims or [dim % 2 for dim in dims] != [1]:
        return NotImplemented
    return x.places.sums.clone().unsqueeze(1) if keepdim else x.places.sums.clone()


def _equal(x: Any, y: Any) -> Any:
    if not isinstance(x, LazyTensor) or not isinstance(y, LazyTensor) or x.is_written or y.is_written:
        return NotImplemented
    if x.places.digests is None or y.places.digests is None:
        return NotImplemented
    return x.shape == y.shape and x.dtype == y.dtype and bool((x.places.digests == y.places.digests).all())


def _likewise(func: Any) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(each, LazyTensor) for each in args):
            return NotImplemented
        return func(torch.zeros((), dtype=x.dtype).expand(x.shape), *args, **options)

    return call


_ADDRESSED: dict[Any, Callable[..., Any]] = {
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
    **{
        func: _likewise(func)
        for func in (
            _aten.empty_like.default,
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.full_like.default,
            _aten.new_empty.default,
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_full.default,
        )
    },
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
    data: DataProto, put: Callable[[Block], Any] | None = None, block_bytes: int | None = None
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
    columns = {
        str(name): value.contiguous()
        for name, value in data.batch.items()
        if isinstance(value, Tensor) and _may_leave(value)
    }
    columns = {name: value.touched() if isinstance(value, LazyTensor) else value for name, value in columns.items()}
    count = len(data)
    stored = data.select()
    if not columns or not count:
        return stored
    assert stored.batch is not None
    row_bytes = sum(value[0].numel() * value.element_size() for value in columns.values())
    most = BLOCK_BYTES if block_bytes is None else block_bytes
    size = max(1, min(count, most // max(1, row_bytes)))
    blocks = tuple(
        store({name: serialize_single_tensor(value[at : at + size]) for name, value in columns.items()})
        for at in range(0, count, size)
    )
    rows = np.arange(count, dtype=np.int32)
    for name, value in columns.items():
        sums = value.sum(-1) if value.dim() == 2 else None
        places = Places(blocks, rows // size, rows % size, sums, row_digests(value))
        stored.batch[name] = LazyTensor(name, places, value.shape[1:], value.dtype)
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
    blocks = read_blocks({_identity(b): b for column in unknown for b in column.places.used().blocks}.values())
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
    """Return the digest of a column of two or more dims with its rows in the given order, from those of its rows."""
    digests = None
    if isinstance(column, LazyTensor) and not column.is_written:
        digests = column.places.digests
    if digests is None:
        digests = row_digests(_plain(column))
    return digest_of_rows(column.dtype, column.shape, digests if order is None else digests[list(order)])


def read_blocks(references: Iterable[Any]) -> dict[Hashable, Block]:
    """Return blocks by the identity of their references; the bytes stay in the memory of the object store."""
    wanted = list(references)
    remote = [each for each in wanted if not isinstance(each, dict)]
    found: dict[Hashable, Block] = {_identity(each): each for each in wanted if isinstance(each, dict)}
    if remote:
        import ray

        found |= zip(remote, ray.get(remote), strict=True)
    return found


Formula = Callable[[DataProto], DataProto]
"""A plain function of some columns of a batch; ``meta_info`` has its options. Other processes import it by its name."""


class Workers(Protocol):
    """A worker group: the registered methods of its workers are attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return a method."""


def computed(
    formula: Formula,
    data: DataProto,
    columns: Iterable[str],
    arrays: Iterable[str] = (),
    group: Workers | None = None,
    **options: Any,
) -> DataProto:
    """Return a formula of some columns: from this process if it has them all, else from the first worker of ``group``.

    It is the same formula over all rows in both cases. Without a group this process reads the columns.

    Args: ``columns`` and ``arrays`` are those that the formula reads, as far as the batch has them; ``options`` are its
        ``meta_info``.
    """
    assert data.batch is not None
    known = {str(name) for name in data.batch.keys()}
    names = [name for name in dict.fromkeys(columns) if name in known]
    part = data.select(names, [name for name in arrays if name in data.non_tensor_batch], [])
    part.meta_info = options
    if group is None or all(column.is_known for column in lazy_columns(part).values()):
        return formula(part)
    part.meta_info = options | {BY_REFERENCE: True}
    output: DataProto = group.execute_func_rank_zero(formula, part)
    return output


def take_touched() -> dict[str, int]:
    """Return the bytes of each column that operations of this process have read since the last call."""
    bytes_by_column = dict(_touched)
    _touched.clear()
    return bytes_by_column


# ---- Ray


def _ray_put() -> Callable[[Block], Any]:
    import ray

    register_with_ray()
    return ray.put


@cache
def register_with_ray() -> None:
    """Let Ray move lazy columns as addresses; once in each process that sends any."""
    import ray

    ray.util.register_serializer(LazyTensor, serializer=_address, deserializer=_column)


class _Rows:
    """Where the rows of a column lie, as it is sent: columns of one message with the same rows share it."""

    def __init__(self, places: Places) -> None:
        self.of = places
        used = places.used()
        self.sent: RowsAddress = (used.blocks, used.block, used.row)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.sent,)

    def serves(self, places: Places) -> bool:
        """Whether the rows of a column lie in the same places."""
        mine = self.of
        if not np.array_equal(mine.block, places.block) or not np.array_equal(mine.row, places.row):
            return False
        return mine.blocks is places.blocks or _same_blocks(mine.blocks, places.blocks)


def _same_blocks(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    if len(first) != len(second) or not first or first[0] is not second[0]:
        return False
    if isinstance(first[0], dict):
        return all(map(operator.is_, first, second))
    return first == second  # the fastest look at many references


RowsAddress = tuple[tuple[Any, ...], np.ndarray, np.ndarray]
Address = (
    tuple[
        str,
        _Rows | RowsAddress,
        TensorTriple | None,
        np.ndarray | None,
        tuple[int, int] | None,
        tuple[int, ...],
        torch.dtype,
    ]
    | Tensor
)

_RECENT = 8
_recent: "deque[weakref.ref[_Rows]]" = deque(maxlen=_RECENT)
"""Rows that were sent last, while the pickle of their message is written."""


def _rows_of(places: Places) -> _Rows:
    for known in tuple(_recent):
        rows = known()
        if rows is not None and rows.serves(places):
            return rows
    rows = _Rows(places)
    _recent.append(weakref.ref(rows))
    return rows


def _address(column: LazyTensor) -> Address:
    if column.is_written:
        return column.fetched()
    places = column.places
    sums = None if places.sums is None else serialize_single_tensor(places.sums)  # torch takes longer
    rows = _rows_of(places)
    return column.column, rows, sums, places.digests, places.window, tuple(column.shape[1:]), column.dtype


def _column(address: Address) -> Tensor:
    if isinstance(address, Tensor):
        return address
    import ray

    if ray.is_initialized():  # this process may send it on
        register_with_ray()
    name, rows, sums, digests, window, row_shape, dtype = address
    blocks, block, row = rows.sent if isinstance(rows, _Rows) else rows
    known = None if sums is None else deserialize_single_tensor(sums)
    places = Places(blocks, block, row, known, digests, window)
    return LazyTensor(name, places, row_shape, dtype)
