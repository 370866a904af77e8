"""DataProto: the batch that travels between the driver and the workers.

Slices and chunks are views. Concatenation and repetition allocate once. A batch is pickled as numpy buffers, so that
Ray moves it out of band; the receiver can write to it, because the tensors are copied out of the buffers: when the
batch is unpickled, or within ``delayed_copies`` when they are first used.
"""

import copy
import io
import logging
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, set_lazy_legacy
from torch import Tensor

from verl.errors import ContractError
from verl.utils import envs, tensordict_utils
from verl.utils.batch import serialization
from verl.utils.loading import load_pickle
from verl.utils.py_functional import deep_equal, object_array, union_two_dict
from verl.utils.tensordict_utils import union_tensor_dict

set_lazy_legacy(False).set()

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

MetaInfo = dict[str, Any]
Arrays = dict[str, np.ndarray]
# The encoded tensors (bytes of torch.save, or the triples of serialize_tensordict), the arrays and meta_info.
State = tuple[bytes | serialization.BatchState | None, MetaInfo, MetaInfo]

SERIALIZATION_ENV = "VERL_DATAPROTO_SERIALIZATION_METHOD"
_padding_size_key = "_padding_size_key_x123d"  # the keyword argument that carries the number of padded rows of a call
_AUTO_PADDING_META_KEY = "_verl_auto_padding"


_RECEIVED = "_received"  # the attribute that holds the encoded tensors until they are copied
_in_thread = threading.local()


@contextmanager
def delayed_copies() -> Iterator[None]:
    """Let batches that this thread unpickles in the block keep the received buffers until their tensors are used.

    ``DataProto.concat`` then writes the joined tensors straight from the buffers, once. At the end of the block the
    other batches are copied, so that nothing refers to the memory of Ray outside of it.
    """
    before = getattr(_in_thread, "delayed", None)
    delayed: list[weakref.ref[DataProto]] = []
    _in_thread.delayed = delayed
    try:
        yield
    finally:
        _in_thread.delayed = before
        for data in (reference() for reference in delayed):
            if data is not None and data._not_copied() is not None:
                data._copy_received()


union_numpy_dict = union_two_dict

OLD_LOG_PROBS_VERSION = "old_log_probs_version"
"""``meta_info`` key: the version of the weights that computed ``old_log_probs``."""
TEMPERATURE = "temperature"
"""``meta_info`` key: the temperature by which the logits of the log-probabilities were divided."""
OF_ONE_CALL = frozenset({"metrics", "timing", OLD_LOG_PROBS_VERSION})
"""Keys of ``meta_info`` that describe a call of the workers and not its rows."""


class _DataProtoConfigMeta(type):
    _value: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        """Whether batches are padded to divide among workers; defaults to ``VERL_AUTO_PADDING``."""
        return envs.flag("VERL_AUTO_PADDING") if cls._value is None else cls._value

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ContractError(f"DataProtoConfig.auto_padding must be a bool, got {enabled!r}")
        cls._value = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Process-wide switches of the protocol."""


@dataclass
class DataProtoItem:
    """One row of a DataProto: ``batch`` has no batch dim, ``meta_info`` is shared with the whole batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)


@dataclass
class DataProto:
    """Tensors with one batch dim, arrays with the same number of rows, and values that all rows share."""

    # Trainers and workers of users call every public method, also those that nothing in this repository calls.

    # A factory leaves no default in the class, so that __getattr__ is asked for a batch that has not been copied yet.
    batch: TensorDict | None = field(default_factory=lambda: None)
    non_tensor_batch: Arrays = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:  # callers may write it, as for the batch
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        self.check_consistency()

    # ---- construction

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | np.ndarray], meta_info: MetaInfo | None = None, auto_padding: bool = False
    ) -> Self:
        """Build from one dict; the type of a value tells tensors from arrays.

        Raises: ValueError for a value that is neither a tensor nor an array.
        """
        tensors: dict[str, Tensor] = {}
        arrays: Arrays = {}
        for key, value in data.items():
            if isinstance(value, Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise ContractError(f"entry {key!r} must be a tensor or an array, got {type(value).__name__}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build from a dict of tensors and a dict of non-tensors; lists of non-tensors become object arrays.

        Raises: ValueError, which is also an AssertionError, when the numbers of rows disagree, and for
            ``num_batch_dims`` other than 1, since a DataProto has exactly one batch dim.
        """
        if num_batch_dims != 1:
            raise ContractError(
                f"num_batch_dims must be 1, got {num_batch_dims}: a DataProto has one batch dim; unfold_batch_dim "
                "flattens more"
            )
        batch = None
        if tensors:
            batch = TensorDict(dict(tensors), batch_size=[tensordict_utils.shared_rows(tensors)])
        arrays = {
            key: value if isinstance(value, np.ndarray) else _rows_as_objects(key, value)
            for key, value in (non_tensors or {}).items()
        }
        meta = {} if meta_info is None else meta_info
        if auto_padding:
            meta[_AUTO_PADDING_META_KEY] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: MetaInfo | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Build from a TensorDict; ``NonTensorStack`` becomes an object array, ``NonTensorData`` goes to meta_info."""
        tensors: dict[str, Tensor] = {}
        arrays: Arrays = {}
        meta = dict(meta_info or {})
        for key, value in tensor_dict.items() if tensor_dict is not None else ():
            if isinstance(value, NonTensorStack):
                arrays[key] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = cast(Tensor, value)
        return cls.from_dict(tensors, arrays, meta, num_batch_dims=num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Return tensors, arrays as lists, and meta_info in one TensorDict.

        Raises: ValueError, which is also an AssertionError, when a key occurs in two of the three.
        """
        entries = self._tensors()
        both = entries.keys() & self.non_tensor_batch.keys()
        if both:
            raise ContractError(f"keys {sorted(both)} are both tensors and arrays")
        lists = {key: value.tolist() for key, value in self.non_tensor_batch.items()}
        return tensordict_utils.get_tensordict({**entries, **lists}, self.meta_info)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Pickle to a file."""
        with open(filepath, "wb") as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], trusted_classes: Iterable[str] = ()) -> "DataProto":
        """Read a file of ``save_to_disk``; ``trusted_classes`` are classes in it that are no tensors or plain values.

        Raises: ValueError when the file does not hold a DataProto, or names other classes.
        """
        data = load_pickle(filepath, trusted_classes)
        if not isinstance(data, DataProto):
            raise ContractError(f"{os.fspath(filepath)!r} holds a {type(data).__name__}, not a DataProto")
        data.check_consistency()
        return data

    def __copy__(self) -> Self:
        """Return an object that shares all values.

        Without this method ``copy.copy`` would go through ``__getstate__``, which encodes for another process.
        """
        return self.select()

    # ---- serialization

    def __getstate__(self) -> State:
        method = (envs.read(SERIALIZATION_ENV) or "numpy").lower()
        if method not in ("numpy", "torch"):
            raise ValueError(f"environment variable {SERIALIZATION_ENV} must be numpy or torch, got {method!r}")
        arrays = {key: serialization.pack_objects(value) for key, value in self.non_tensor_batch.items()}
        meta_info = serialization.pack_objects(self.meta_info)
        if method == "torch":
            buffer = io.BytesIO()
            torch.save(None if self.batch is None else self.batch.contiguous(), buffer)
            return buffer.getvalue(), arrays, meta_info
        if (received := self._not_copied()) is not None:
            return received, arrays, meta_info
        batch = None if self.batch is None else serialization.serialize_tensordict(self.batch, compact=True)
        return batch, arrays, meta_info

    def __setstate__(self, state: State) -> None:
        batch, arrays, meta_info = state
        if isinstance(batch, bytes):
            location = None if torch.accelerator.is_available() else "cpu"
            loaded = torch.load(io.BytesIO(batch), weights_only=True, map_location=location)
            if loaded is not None and loaded.device is not None:
                loaded = loaded.to(serialization.available_device(str(loaded.device)))
            self.batch = loaded
        elif batch is None:
            self.batch = None
        elif (delayed := getattr(_in_thread, "delayed", None)) is not None:
            self.__dict__[_RECEIVED] = batch
            delayed.append(weakref.ref(self))
        else:
            self.batch = serialization.deserialize_tensordict(batch)
        # Packed arrays arrive writable. The others may lie in shared memory, which is read-only.
        self.non_tensor_batch = {
            key: serialization.writable(value) if isinstance(value, np.ndarray) else value
            for key, value in arrays.items()
        }
        self.meta_info = meta_info

    def _not_copied(self) -> serialization.BatchState | None:
        """Return the received form of the tensors if they have not been copied yet."""
        return self.__dict__.get(_RECEIVED)

    def _copy_received(self) -> TensorDict:
        batch = serialization.deserialize_tensordict(self.__dict__[_RECEIVED])
        self.batch = batch
        return batch

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Copy the tensors of a received batch when they are first used."""
            if name != "batch" or _RECEIVED not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return self._copy_received()

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; a new batch replaces one that has not been copied yet."""
            if name == "batch":
                self.__dict__.pop(_RECEIVED, None)
            object.__setattr__(self, name, value)

    # ---- inspection

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(value) for value in self.non_tensor_batch.values()), 0)

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: "slice | list[int] | list[bool] | np.ndarray | Tensor") -> Self: ...
    def __getitem__(
        self, item: "int | np.integer | slice | list[int] | list[bool] | np.ndarray | Tensor"
    ) -> "Self | DataProtoItem":
        """Return a DataProtoItem for an integer, else a DataProto; a slice is a view."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            row = int(tensordict_utils.resolve_indices([int(item)], len(self))[0])
            arrays = {key: value[row] for key, value in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[row], arrays, self.meta_info)
        if isinstance(item, list | np.ndarray | Tensor):
            return self.select_idxs(item)
        raise TypeError(f"index a DataProto by an integer, slice, list, array or tensor, got {type(item).__name__}")

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def check_consistency(self) -> None:
        """Check that all entries have the same number of rows.

        Raises: ValueError, which is also an AssertionError.
        """
        if self.batch is not None and not isinstance(self.batch, TensorDict):
            raise ContractError(f"batch must be a TensorDict (see from_dict), got {type(self.batch).__name__}")
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ContractError(f"batch must have exactly one batch dim, got batch size {tuple(self.batch.batch_size)}")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise ContractError(f"non_tensor_batch[{key!r}] must be an array, got {type(value).__name__}")
            if value.ndim == 0 or value.shape[0] != len(self):
                raise ContractError(
                    f"non_tensor_batch[{key!r}] has shape {value.shape}, the batch has {len(self)} rows"
                )

    def print_size(self, prefix: str = "") -> None:
        """Write the size of tensors and arrays in GiB to standard output."""
        tensors = self.tensor_bytes()
        arrays = sum(value.nbytes for value in self.non_tensor_batch.values())
        start = f"{prefix}, " if prefix else ""
        sys.stdout.write(f"{start}tensors {tensors / 2**30} GiB, arrays {arrays / 2**30} GiB\n")

    def tensor_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(value.numel() * value.element_size() for value in self._tensors().values())

    def get_data_info(self) -> str:
        """Describe keys, shapes, dtypes, devices and the types in meta_info, one per line."""
        lines = ["batch"]
        for key, value in self._tensors().items():
            lines.append(f"  {key}: {tuple(value.shape)} ({value.dtype}) {value.device}")
        lines.append("non_tensor_batch")
        lines.extend(f"  {key}: ndarray{value.shape} ({value.dtype})" for key, value in self.non_tensor_batch.items())
        lines.append("meta_info")
        lines.extend(f"  {key}: {type(value).__name__}" for key, value in self.meta_info.items())
        return "\n".join(lines)

    def is_padding_enabled(self) -> bool:
        """Whether this batch may be padded, or cut into unequal chunks."""
        return bool(self.meta_info.get(_AUTO_PADDING_META_KEY, False)) or DataProtoConfig.auto_padding

    # ---- rows

    def _with(self, batch: TensorDict | None, arrays: Arrays) -> Self:
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def _gather(self, index: Tensor) -> Self:
        rows = index.cpu().numpy()
        arrays = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return self._with(tensordict_utils.index_select_tensor_dict(self.batch, index), arrays)

    def _take(self, index: Tensor) -> None:
        """Replace the rows of this batch by the rows of another one."""
        other = self._gather(index)
        self.batch = other.batch
        self.non_tensor_batch = other.non_tensor_batch

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Self:
        """Gather rows by integers or by a boolean mask.

        Raises: IndexError when an index is out of range or a mask has another length.
        """
        return self._gather(tensordict_utils.resolve_indices(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows as views; a negative step copies."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self._gather(torch.arange(len(self))[list(range(*rows.indices(len(self))))])
        arrays = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return self._with(None if self.batch is None else self.batch[rows], arrays)

    def reorder(self, indices: Tensor) -> None:
        """Reorder the rows, in place."""
        self._take(tensordict_utils.resolve_indices(indices, len(self)))

    def map_entries(
        self,
        num_rows: int,
        on_tensor: Callable[[str, Tensor], Tensor],
        on_array: Callable[[str, np.ndarray], np.ndarray],
    ) -> Self:
        """Replace every entry by ``on_tensor(key, value)`` or ``on_array(key, value)``, in a batch of ``num_rows``."""
        arrays = {key: on_array(key, value) for key, value in self.non_tensor_batch.items()}
        if self.batch is None:
            return self._with(None, arrays)
        tensors = {key: on_tensor(key, value) for key, value in self._tensors().items()}
        return self._with(TensorDict(tensors, batch_size=[num_rows], device=self.batch.device), arrays)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row (aabb), or the whole batch (abab)."""
        if repeat_times < 0:
            raise ContractError(f"repeat_times must not be negative, got {repeat_times}")
        rows = torch.arange(len(self))
        return self._gather(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else cast(dict[str, Tensor], dict(self.batch.items()))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> Self:
        """Repeat every row by its own count, interleaved.

        Raises: ValueError, which is also an AssertionError, unless each row has one whole, non-negative count.
        """
        counts = tensordict_utils.repeat_counts(repeat_times, len(self))
        return self._gather(torch.arange(len(self)).repeat_interleave(counts))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of the first row (candidate ``first``), else of the last, in place."""
        if padding_size < 0:
            raise ContractError(f"padding_size must not be negative, got {padding_size}")
        if padding_size == 0:
            return
        if len(self) == 0:
            raise ContractError("cannot pad a batch that has no rows")
        row = 0 if padding_candidate == "first" else len(self) - 1
        self._take(torch.tensor([*range(len(self)), *[row] * padding_size]))

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into ``chunks`` parts, as views.

        Raises: ValueError, which is also an AssertionError, when rows do not divide evenly and padding is not enabled.
        """
        num_rows = len(self)
        if chunks <= 0:
            raise ContractError(f"chunks must be positive, got {chunks}")
        if num_rows % chunks != 0 and not self.is_padding_enabled():
            raise ContractError(f"{num_rows} rows do not divide into {chunks} equal chunks; pad it or enable padding")
        base, larger = divmod(num_rows, chunks)
        bounds = [part * base + min(part, larger) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]

    def split(self, split_size: int) -> list[Self]:
        """Cut into parts of ``split_size`` rows, as views; the last may be shorter."""
        if split_size <= 0:
            raise ContractError(f"split_size must be positive, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Join the rows of all parts; a single part shares its memory with the result.

        ``meta_info["metrics"]`` of all parts become one dict of lists; other keys must hold equal values.

        Raises: ValueError, which is also an AssertionError, when keys, row shapes or meta_info disagree.
        """
        if not data:
            raise ContractError("concat needs at least one part")
        first = data[0]
        received = [state for part in data if (state := part._not_copied()) is not None]
        batch = serialization.join_tensordicts(received) if len(received) == len(data) > 1 else None
        if batch is None and first.batch is not None:
            tensors = concat_entries([part._tensors() for part in data], tensordict_utils.concat_tensors)
            batch = TensorDict(tensors, batch_size=[sum(len(part) for part in data)], device=first.batch.device)
        elif batch is None:
            concat_entries([part._tensors() for part in data], tensordict_utils.concat_tensors)
        arrays = concat_entries([part.non_tensor_batch for part in data], concat_arrays)
        return type(first)(
            batch=batch, non_tensor_batch=arrays, meta_info=_merge_meta_info([part.meta_info for part in data])
        )

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches ``epochs`` times; ``dataloader_kwargs={"shuffle": True}`` orders them by ``seed``.

        Rows in order are views, shuffled rows copies.

        Raises: ValueError, which is also an AssertionError, when rows do not divide evenly.
        """
        rows = tensordict_utils.mini_batch_indices(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self.slice(part.start, part.stop) if isinstance(part, slice) else self._gather(part) for part in rows)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Turn every row into ``n_split``: (B, C, ...) to (B * n, C / n, ...) for ``split_keys``, others repeated.

        Rows that are lists, all of one length C, count as (B, C).

        Raises: ValueError, which is also an AssertionError, when C does not divide evenly.
        """
        if n_split <= 0:
            raise ContractError(f"n_split must be positive, got {n_split}")
        keys = set(split_keys or ())
        num_rows = len(self) * n_split

        def shape_of(key: str, shape: Sequence[int]) -> tuple[int, ...]:
            if len(shape) < 2 or shape[1] % n_split != 0:
                raise ContractError(f"the columns of {key!r} with shape {tuple(shape)} do not divide by {n_split}")
            return (num_rows, shape[1] // n_split, *shape[2:])

        def unfolded(key: str, value: np.ndarray) -> np.ndarray:
            if key not in keys:
                return value.repeat(n_split, axis=0)
            columns = _lists_as_columns(key, value) if value.dtype == object and value.ndim == 1 else value
            return columns.reshape(shape_of(key, columns.shape))

        return self.map_entries(
            num_rows,
            lambda key, value: (
                value.reshape(shape_of(key, value.shape)) if key in keys else value.repeat_interleave(n_split, dim=0)
            ),
            unfolded,
        )

    # ---- columns

    def to(self, device: str | torch.device | int) -> Self:
        """Move the tensors to a device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a new object with the given keys; None keeps all of a kind, ``deepcopy`` copies all but the tensors.

        Raises: KeyError naming the missing keys.
        """
        batch = self.batch
        if batch is not None and batch_keys is not None:
            batch = TensorDict(
                _pick("batch", self._tensors(), batch_keys), batch_size=batch.batch_size, device=batch.device
            )
        elif batch is not None:
            batch = batch.copy()
        elif batch_keys:
            _pick("batch", {}, batch_keys)
        arrays = _pick("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = _pick("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            arrays = copy.deepcopy(arrays)
            meta_info = copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove keys and return them as a new object; remove nothing when one is missing.

        Raises: ValueError, which is also an AssertionError, naming the missing keys.
        """
        try:
            part = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        except KeyError as error:
            raise ContractError(f"cannot pop: {error.args[0]}") from None
        for key in batch_keys or ():
            assert self.batch is not None  # select has found the keys
            self.batch.del_(key)
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return part if batch_keys else type(self)(None, part.non_tensor_batch, part.meta_info)

    def rename(self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None) -> Self:
        """Rename tensor keys in place, all at once, so that names can be swapped.

        Raises: TypeError for keys that are not strings, ValueError when counts differ or a new name is taken.
        """
        old = _as_key_list("old_keys", old_keys)
        new = _as_key_list("new_keys", new_keys)
        if len(old) != len(new):
            raise ContractError(f"rename needs one new key per old key, got {old} and {new}")
        if not old:
            return self
        if self.batch is None:
            raise ContractError(f"cannot rename {old}: the batch has no tensors")
        entries = self._tensors()
        values = _pick("batch", entries, old)
        taken = [key for key in new if key in entries and key not in old]
        if taken or len(set(new)) != len(new):
            raise ContractError(f"cannot rename {old} to {new}: {taken or 'a new key'} would occur twice")
        for key in old:
            self.batch.del_(key)
        for key, value in zip(new, values.values(), strict=True):
            self.batch[key] = value
        return self

    def union(self, other: "DataProto") -> Self:
        """Merge another batch of the same rows into this one; change nothing when they conflict.

        Entries of ``meta_info`` about one call of the workers (``OF_ONE_CALL``) never conflict: the later call wins,
        and its metrics and timers join the metrics and timers of earlier calls.

        Raises: ValueError, which is also an AssertionError, when row counts or the values of a shared key differ.
        """
        has_rows = [part for part in (self, other) if part.batch is not None or part.non_tensor_batch]
        if len({len(part) for part in has_rows}) > 1:
            raise ContractError(f"parts to unite must have the same number of rows, got {len(self)} and {len(other)}")
        meta_info = _united_meta_info(self.meta_info, other.meta_info)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if self.batch is not None and other.batch is not None:
            self.batch = union_tensor_dict(self.batch, other.batch)
        elif other.batch is not None:
            self.batch = other.batch.copy()
        self.non_tensor_batch = arrays
        self.meta_info = meta_info
        return self


# ---- dicts of arrays and free values


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
    """Turn dicts with the same keys into one dict of lists.

    Raises: ValueError, which is also an AssertionError, when the keys of a dict differ from those of the first.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for entry in list_of_dict:
        if entry.keys() != keys:
            raise ContractError(f"all dicts must have the keys {sorted(keys)}, got {sorted(entry.keys())}")
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def _rows_as_objects(key: str, values: Any) -> np.ndarray:
    """Return one value per row as an array of objects.

    Raises: ValueError, which is also an AssertionError, for a string, a mapping or a value without length.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise ContractError(f"non_tensors[{key!r}] must hold one value per row, got a {type(values).__name__}")
    return object_array(values)


def _lists_as_columns(key: str, rows: np.ndarray) -> np.ndarray:
    """Return (B,) objects that are lists of one length C as (B, C) objects; other objects come back unchanged.

    Raises: ValueError, which is also an AssertionError, when the lengths differ.
    """
    if not len(rows) or not all(isinstance(row, list | tuple | np.ndarray) for row in rows):
        return rows
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise ContractError(f"the lists of {key!r} must have one length to be split, got {sorted(lengths)}")
    return object_array([item for row in rows for item in row]).reshape(len(rows), lengths.pop())


def _pick(kind: str, entries: dict[str, Value], keys: Sequence[str] | None) -> dict[str, Value]:
    """Return the entries of the given keys; None means all.

    Raises: KeyError naming the missing keys.
    """
    if keys is None:
        return dict(entries)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise KeyError(f"keys {missing} are not in {kind}; it has {sorted(entries)}")
    return {key: entries[key] for key in keys}


def _as_key_list(name: str, keys: str | Sequence[str] | None) -> list[str]:
    """Return one key or several keys as a list.

    Raises: TypeError unless the keys are strings.
    """
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"{name} must be a string or a list of strings, got {keys!r}")
    return list(keys)


def concat_arrays(key: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate rows with one allocation; a single part is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ContractError(f"parts of {key!r} differ in their row shapes: {[part.shape for part in parts]}")
    return np.concatenate(parts, axis=0)


def concat_entries(parts: Sequence[dict[str, Value]], join: Callable[[str, list[Value]], Value]) -> dict[str, Value]:
    """Join the values of each key over dicts with the same keys."""
    keys = parts[0].keys()
    for number, part in enumerate(parts):
        if part.keys() != keys:
            raise ContractError(f"part {number} and part 0 differ in the keys {sorted(part.keys() ^ keys)}")
    return {key: join(key, [part[key] for part in parts]) for key in keys}


def _merge_meta_info(parts: Sequence[MetaInfo]) -> MetaInfo:
    """Merge dicts; the values of ``metrics`` become one dict of lists.

    Raises: ValueError, which is also an AssertionError, when another key holds different values.
    """
    merged: MetaInfo = {}
    metrics: list[Mapping[str, Any]] = []
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == "metrics":
                metrics.extend(value) if isinstance(value, list) else metrics.append(value)
            elif key in merged and not deep_equal(merged[key], value):
                raise ContractError(
                    f"meta_info[{key!r}] of part {number} is {value!r}, an earlier part has {merged[key]!r}"
                )
            else:
                merged.setdefault(key, value)
    if any("metrics" in part for part in parts):
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged


def _united_meta_info(earlier: MetaInfo, later: MetaInfo) -> MetaInfo:
    """Merge the meta_info of two batches of the same rows, see ``DataProto.union``."""
    lasting = {key: value for key, value in later.items() if key not in OF_ONE_CALL}
    if earlier.get(TEMPERATURE, later.get(TEMPERATURE)) != later.get(TEMPERATURE, earlier.get(TEMPERATURE)):
        raise ContractError(
            f"meta_info[{TEMPERATURE!r}]: log-probabilities of the batch are at {earlier[TEMPERATURE]}, those to add "
            f"at {later[TEMPERATURE]}: compute all at the rollout's temperature (actor_rollout_ref.rollout.temperature)"
        )
    united = union_two_dict(dict(earlier), lasting)
    for key in OF_ONE_CALL & later.keys():
        known = united.get(key)
        if isinstance(known, Mapping) and isinstance(later[key], Mapping):
            united[key] = {**known, **later[key]}
        else:
            united[key] = later[key]
    return united


# ---- rows of a batch


def collate_fn(items: list[DataProtoItem]) -> DataProto:
    """Stack rows into a batch with the meta_info of the first."""
    if not items:
        raise ContractError("collate_fn needs at least one row")
    first = items[0]
    rows = [item.batch for item in items if item.batch is not None]
    tensors = {}
    if first.batch is not None:
        tensors = {str(key): torch.stack([row[key] for row in rows]) for key in first.batch.keys()}
    arrays = {key: object_array([item.non_tensor_batch[key] for item in items]) for key in first.non_tensor_batch}
    return DataProto.from_dict(tensors, arrays, first.meta_info)


def tensors_of(data: DataProto) -> MutableMapping[str, Tensor]:
    """Return the tensors of a batch.

    Raises: ValueError when it has none.
    """
    if data.batch is None:
        raise ValueError("the batch holds no tensors: it needs input_ids, attention_mask, position_ids and responses")
    tensors: Any = data.batch  # a TensorDict behaves like a mapping but does not inherit from MutableMapping
    return tensors


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the head until the row count is divisible; return the batch and the number of added rows."""
    if not isinstance(data, DataProto):
        raise ContractError(f"data must be a DataProto, got {type(data).__name__}")
    added = tensordict_utils.pad_indices(len(data), size_divisor)
    if len(data) == 0:
        logger.warning("cannot pad a batch that has no rows")
    if not added:
        return data, 0
    return data.select_idxs([*range(len(data)), *added]), len(added)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows; the result is a view."""
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape (B, ...) to (new, B / new, ...) in all entries, as views if possible.

    Raises: ValueError, which is also an AssertionError, when B does not divide evenly.
    """
    if new_batch_size <= 0 or len(data) % new_batch_size != 0:
        raise ContractError(f"{len(data)} rows do not fold into {new_batch_size}")
    inner = len(data) // new_batch_size
    return data.map_entries(
        new_batch_size,
        lambda _, tensor: tensor.reshape(new_batch_size, inner, *tensor.shape[1:]),
        lambda _, array: array.reshape(new_batch_size, inner, *array.shape[1:]),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the leading ``batch_dims`` dims of all entries into one, as views if possible."""
    entries = [*(data.batch.values() if data.batch is not None else ()), *data.non_tensor_batch.values()]
    leading = {tuple(value.shape[:batch_dims]) for value in entries}
    if len(leading) > 1 or any(len(shape) < batch_dims for shape in leading):
        raise ContractError(f"entries must agree in their first {batch_dims} dims, got {sorted(leading)}")
    size = int(np.prod(leading.pop())) if leading else 0
    return data.map_entries(
        size,
        lambda _, tensor: tensor.reshape(size, *tensor.shape[batch_dims:]),
        lambda _, array: array.reshape(size, *array.shape[batch_dims:]),
    )
