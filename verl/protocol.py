"""DataProto: the batch that travels between the driver and the workers.

Slices and chunks are views. Concatenation and repetition allocate once. A batch is pickled as numpy buffers, so that
Ray moves it out of band; what is received can be written.
"""

import copy
import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict, set_lazy_legacy
from torch import Tensor

from verl.utils import envs
from verl.utils.batch.dicts import (
    as_key_list,
    concat_arrays,
    concat_entries,
    list_of_dict_to_dict_of_list,
    merge_meta_info,
    object_array,
    pick,
    rows_as_objects,
    union_numpy_dict,
)
from verl.utils.batch.serialization import (
    available_device,
    deserialize_single_tensor,
    deserialize_tensordict,
    pack_objects,
    serialize_single_tensor,
    serialize_tensordict,
    writable,
)
from verl.utils.device import get_device_id
from verl.utils.py_functional import ConflictError, union_two_dict
from verl.utils.tensordict_utils import (
    BatchError,
    all_gather_rows,
    concat_tensors,
    get_tensordict,
    index_select_tensor_dict,
    mini_batch_indices,
    pad_indices,
    repeat_counts,
    resolve_indices,
    shared_rows,
    union_tensor_dict,
)

if TYPE_CHECKING:
    from ray import ObjectRef

# The first two are the interface of old; the others are established names that are imported from here.
__all__ = ["DataProto", "union_tensor_dict"]
__re_exported__ = (deserialize_single_tensor, list_of_dict_to_dict_of_list, serialize_single_tensor)

logger = logging.getLogger(__name__)
set_lazy_legacy(False).set()

SERIALIZATION_ENV = "VERL_DATAPROTO_SERIALIZATION_METHOD"
_padding_size_key = "_padding_size_key_x123d"
_AUTO_PADDING_META_KEY = "_verl_auto_padding"


class _DataProtoConfigMeta(type):
    _value: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        """Whether batches are padded to divide among workers; ``VERL_AUTO_PADDING`` unless it is set here."""
        return envs.flag("VERL_AUTO_PADDING") if cls._value is None else cls._value

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise BatchError(f"DataProtoConfig.auto_padding must be a bool, got {enabled!r}")
        cls._value = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Switches of the protocol that hold for the whole process."""


@dataclass
class DataProtoItem:
    """One row of a DataProto; ``batch`` has no batch dim, ``meta_info`` is shared with the batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Tensors with one batch dim, arrays with as many rows, and values that are not per row."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---- construction

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Build from one dict, told apart by type.

        Raises: ValueError for a value that is neither a tensor nor an array.
        """
        tensors: dict[str, Tensor] = {}
        arrays: dict[str, np.ndarray] = {}
        for key, value in data.items():
            if isinstance(value, Tensor):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise BatchError(f"entry {key!r} must be a tensor or an array, got {type(value).__name__}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build from a dict per kind; lists of non-tensors become object arrays.

        Raises: ValueError, which is also an AssertionError, when the first ``num_batch_dims`` dims disagree.
        """
        if num_batch_dims <= 0:
            raise BatchError(f"num_batch_dims must be positive, got {num_batch_dims}")
        if num_batch_dims > 1 and non_tensors:
            raise BatchError(f"num_batch_dims must be 1 with non-tensors, got {num_batch_dims}")
        batch = TensorDict(dict(tensors), batch_size=[shared_rows(tensors, num_batch_dims)]) if tensors else None
        arrays = {
            key: value if isinstance(value, np.ndarray) else rows_as_objects(key, value)
            for key, value in (non_tensors or {}).items()
        }
        meta = {} if meta_info is None else meta_info
        if auto_padding:
            meta[_AUTO_PADDING_META_KEY] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Build from a TensorDict: stacks become object arrays, values that all rows share meta_info."""
        tensors: dict[str, Tensor] = {}
        arrays: dict[str, np.ndarray] = {}
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

        Raises: ValueError, which is also an AssertionError, when a key is in two of the three.
        """
        entries = self._tensors()
        both = entries.keys() & self.non_tensor_batch.keys()
        if both:
            raise BatchError(f"keys {sorted(both)} are both tensors and arrays")
        lists = {key: value.tolist() for key, value in self.non_tensor_batch.items()}
        return get_tensordict({**entries, **lists}, self.meta_info)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Pickle to a file."""
        with open(filepath, "wb") as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> "DataProto":
        """Read what ``save_to_disk`` wrote; the file must be trusted.

        Raises: ValueError when the file holds something else.
        """
        with open(filepath, "rb") as file:
            data = pickle.load(file)
        if not isinstance(data, DataProto):
            raise BatchError(f"{os.fspath(filepath)!r} holds a {type(data).__name__}, not a DataProto")
        return data

    def __copy__(self) -> Self:
        """Return an object that shares all values: its state is for another process, not for a copy in this one."""
        return self.select()

    # ---- serialization

    def __getstate__(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        method = (envs.read(SERIALIZATION_ENV) or "numpy").lower()
        batch: Any = None
        if method == "torch":
            buffer = io.BytesIO()
            torch.save(None if self.batch is None else self.batch.contiguous(), buffer)
            batch = buffer.getvalue()
        elif method != "numpy":
            raise ValueError(f"environment variable {SERIALIZATION_ENV} must be numpy or torch, got {method!r}")
        elif self.batch is not None:
            batch = serialize_tensordict(self.batch)
        return (
            batch,
            {key: pack_objects(value) for key, value in self.non_tensor_batch.items()},
            pack_objects(self.meta_info),
        )

    def __setstate__(self, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        batch, arrays, meta_info = state
        if isinstance(batch, bytes):
            location = None if torch.accelerator.is_available() else "cpu"
            loaded = torch.load(io.BytesIO(batch), weights_only=False, map_location=location)
            if loaded is not None and loaded.device is not None:
                loaded = loaded.to(available_device(str(loaded.device)))
            batch = loaded
        elif batch is not None:
            batch = deserialize_tensordict(batch)
        self.batch = batch
        self.non_tensor_batch = {key: _unpacked(value) for key, value in arrays.items()}
        self.meta_info = _unpacked(meta_info)

    # ---- inspection

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(value) for value in self.non_tensor_batch.values()), 0)

    def __getitem__(self, item: Any) -> "DataProto | DataProtoItem":
        """Return a DataProtoItem for an integer, else a DataProto; a slice is a view."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            row = int(resolve_indices([int(item)], len(self))[0])
            arrays = {key: value[row] for key, value in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[row], arrays, self.meta_info)
        if isinstance(item, list | np.ndarray | Tensor):
            return self.select_idxs(item)
        raise TypeError(
            f"a DataProto is indexed by an integer, slice, list, array or tensor, got {type(item).__name__}"
        )

    def __iter__(self) -> "Iterator[DataProtoItem]":
        return (cast(DataProtoItem, self[row]) for row in range(len(self)))

    def check_consistency(self) -> None:
        """Check that all entries have the same number of rows.

        Raises: ValueError, which is also an AssertionError.
        """
        if self.batch is not None and not isinstance(self.batch, TensorDict):
            raise BatchError(f"batch must be a TensorDict (see from_dict), got {type(self.batch).__name__}")
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError(f"batch must have exactly one batch dim, got batch size {tuple(self.batch.batch_size)}")
        for key, value in self.non_tensor_batch.items():
            if not isinstance(value, np.ndarray):
                raise BatchError(f"non_tensor_batch[{key!r}] must be an array, got {type(value).__name__}")
            if value.ndim == 0 or value.shape[0] != len(self):
                raise BatchError(f"non_tensor_batch[{key!r}] has shape {value.shape}, the batch has {len(self)} rows")

    def print_size(self, prefix: str = "") -> None:
        """Write the size of tensors and arrays in GiB to standard output."""
        tensors = sum(value.numel() * value.element_size() for value in self._tensors().values())
        arrays = sum(value.nbytes for value in self.non_tensor_batch.values())
        sys.stdout.write(
            f"{prefix + ', ' if prefix else ''}tensors {tensors / 2**30} GiB, arrays {arrays / 2**30} GiB\n"
        )

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

    def _with(self, batch: TensorDict | None, arrays: dict[str, np.ndarray]) -> Self:
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def _gather(self, index: Tensor) -> Self:
        rows = index.cpu().numpy()
        arrays = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return self._with(index_select_tensor_dict(self.batch, index), arrays)

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Self:
        """Gather rows by integers or by a boolean mask.

        Raises: IndexError when an index is out of range or a mask has another length.
        """
        return self._gather(resolve_indices(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return rows as views; a negative step copies."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self._gather(torch.arange(len(self))[list(range(*rows.indices(len(self))))])
        arrays = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return self._with(None if self.batch is None else self.batch[rows], arrays)

    def reorder(self, indices: Tensor) -> None:
        """Put rows into another order, in place."""
        other = self._gather(resolve_indices(indices, len(self)))
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row (aabb), or the whole batch (abab)."""
        if repeat_times < 0:
            raise BatchError(f"repeat_times must not be negative, got {repeat_times}")
        num_rows = len(self)

        def tile(value: Tensor) -> Tensor:
            expanded = value.unsqueeze(0).expand(repeat_times, *value.shape)
            return expanded.reshape(repeat_times * num_rows, *value.shape[1:]) if repeat_times != 1 else value.clone()

        batch = None
        if self.batch is not None:
            grow = (lambda value: value.repeat_interleave(repeat_times, dim=0)) if interleave else tile
            batch = self._rebuilt({key: grow(value) for key, value in self._tensors().items()}, num_rows * repeat_times)
        arrays = {
            key: value.repeat(repeat_times, axis=0)
            if interleave
            else np.tile(value, (repeat_times, *[1] * (value.ndim - 1)))
            for key, value in self.non_tensor_batch.items()
        }
        return self._with(batch, arrays)

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.batch is None else cast(dict[str, Tensor], dict(self.batch.items()))

    def _rebuilt(self, tensors: dict[str, Tensor], num_rows: int) -> TensorDict:
        device = None if self.batch is None else self.batch.device
        return TensorDict(tensors, batch_size=[num_rows], device=device)

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> Self:
        """Repeat every row by its own count, interleaved.

        Raises: ValueError, which is also an AssertionError, when there is not one whole, non-negative count per row.
        """
        counts = repeat_counts(repeat_times, len(self))
        return self._gather(torch.arange(len(self)).repeat_interleave(counts))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of the first row (candidate ``first``), else of the last, in place."""
        if padding_size < 0:
            raise BatchError(f"padding_size must not be negative, got {padding_size}")
        if padding_size == 0:
            return
        if len(self) == 0:
            raise BatchError("a batch without rows holds nothing to pad with")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self._gather(torch.tensor([*range(len(self)), *[row] * padding_size]))
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into ``chunks`` parts, as views.

        Raises: ValueError, which is also an AssertionError, when rows do not divide evenly and padding is not enabled.
        """
        num_rows = len(self)
        if chunks <= 0:
            raise BatchError(f"chunks must be positive, got {chunks}")
        if num_rows % chunks != 0 and not self.is_padding_enabled():
            raise BatchError(
                f"{num_rows} rows do not divide into {chunks} equal chunks; pad the batch or enable padding"
            )
        base, larger = divmod(num_rows, chunks)
        bounds = [part * base + min(part, larger) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]

    def split(self, split_size: int) -> list[Self]:
        """Cut into parts of ``split_size`` rows, as views; the last may be shorter."""
        if split_size <= 0:
            raise BatchError(f"split_size must be positive, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Join the rows of all parts; a single part shares its memory with the result.

        ``meta_info["metrics"]`` of all parts become one dict of lists; other keys must hold equal values.

        Raises: ValueError, which is also an AssertionError, when keys, row shapes or meta_info disagree.
        """
        if not data:
            raise BatchError("concat needs at least one part")
        first = data[0]
        batch = None
        tensors = concat_entries([part._tensors() for part in data], concat_tensors)
        if first.batch is not None:
            batch = first._rebuilt(tensors, sum(len(part) for part in data))
        arrays = concat_entries([part.non_tensor_batch for part in data], concat_arrays)
        return type(first)(
            batch=batch, non_tensor_batch=arrays, meta_info=merge_meta_info([part.meta_info for part in data])
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
        rows = mini_batch_indices(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self.slice(part.start, part.stop) if isinstance(part, slice) else self._gather(part) for part in rows)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Turn every row into ``n_split``: (B, C, ...) to (B * n, C / n, ...) for ``split_keys``, others repeated.

        Raises: ValueError, which is also an AssertionError, when C does not divide evenly.
        """
        if n_split <= 0:
            raise BatchError(f"n_split must be positive, got {n_split}")
        keys = set(split_keys or ())
        num_rows = len(self) * n_split

        def shape_of(key: str, shape: Sequence[int]) -> tuple[int, ...]:
            if len(shape) < 2 or shape[1] % n_split != 0:
                raise BatchError(f"the columns of {key!r} with shape {tuple(shape)} do not divide by {n_split}")
            return (num_rows, shape[1] // n_split, *shape[2:])

        tensors = {
            key: value.reshape(shape_of(key, value.shape)) if key in keys else value.repeat_interleave(n_split, dim=0)
            for key, value in self._tensors().items()
        }
        arrays = {
            key: value.reshape(shape_of(key, value.shape)) if key in keys else value.repeat(n_split, axis=0)
            for key, value in self.non_tensor_batch.items()
        }
        return self._with(None if self.batch is None else self._rebuilt(tensors, num_rows), arrays)

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
        """Return a new object with the given keys; None keeps all of a kind, ``deepcopy`` copies what is no tensor.

        Raises: KeyError naming the missing keys.
        """
        batch = self.batch
        if batch is not None and batch_keys is not None:
            batch = TensorDict(
                pick("batch", self._tensors(), batch_keys), batch_size=batch.batch_size, device=batch.device
            )
        elif batch is not None:
            batch = batch.copy()
        elif batch_keys:
            pick("batch", {}, batch_keys)
        arrays = pick("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = pick("meta_info", self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove keys and return them as a new object; nothing is removed when one is missing.

        Raises: ValueError, which is also an AssertionError, naming the missing keys.
        """
        try:
            part = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        except KeyError as error:
            raise BatchError(f"cannot pop: {error.args[0]}") from None
        for key in batch_keys or ():
            cast(TensorDict, self.batch).del_(key)
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return part if batch_keys else type(self)(None, part.non_tensor_batch, part.meta_info)

    def rename(self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None) -> Self:
        """Rename tensor keys in place, all at once, so that names can be swapped.

        Raises: TypeError for keys that are no strings, ValueError when counts differ or a new name is taken.
        """
        old, new = as_key_list("old_keys", old_keys), as_key_list("new_keys", new_keys)
        if len(old) != len(new):
            raise BatchError(f"rename needs one new key per old key, got {old} and {new}")
        if not old:
            return self
        if self.batch is None:
            raise BatchError(f"cannot rename {old}: there are no tensors")
        entries = self._tensors()
        values = pick("batch", entries, old)
        taken = [key for key in new if key in entries and key not in old]
        if taken or len(set(new)) != len(new):
            raise BatchError(f"cannot rename {old} to {new}: {taken or 'a new key'} would be there twice")
        for key in old:
            self.batch.del_(key)
        for key, value in zip(new, values.values(), strict=True):
            self.batch[key] = value
        return self

    def union(self, other: "DataProto") -> Self:
        """Merge another batch of the same rows into this one; nothing changes when they conflict.

        Raises: ValueError, which is also an AssertionError, when row counts or the values of a shared key differ.
        """
        has_rows = [part for part in (self, other) if part.batch is not None or part.non_tensor_batch]
        if len({len(part) for part in has_rows}) > 1:
            raise ConflictError(f"parts to unite must have the same number of rows, got {len(self)} and {len(other)}")
        meta_info = union_two_dict(dict(self.meta_info), other.meta_info)
        arrays = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        if self.batch is not None and other.batch is not None:
            self.batch = union_tensor_dict(self.batch, other.batch)
        elif other.batch is not None:
            self.batch = other.batch.copy()
        self.non_tensor_batch, self.meta_info = arrays, meta_info
        return self


def _unpacked(value: Any) -> Any:
    """Make the arrays that were not packed writable; packed ones are so already."""
    return writable(value) if isinstance(value, np.ndarray) else value


def collate_fn(items: list[DataProtoItem]) -> DataProto:
    """Stack rows into a batch with the meta_info of the first."""
    if not items:
        raise BatchError("collate_fn needs at least one row")
    tensors: dict[str, Tensor] = {}
    if items[0].batch is not None:
        rows = [cast(TensorDict, item.batch) for item in items]
        tensors = {str(key): torch.stack([row[key] for row in rows]) for key in rows[0].keys()}
    arrays = {key: object_array([item.non_tensor_batch[key] for item in items]) for key in items[0].non_tensor_batch}
    return DataProto.from_dict(tensors, arrays, items[0].meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the head until the row count is divisible; returns the result and how many were added."""
    if not isinstance(data, DataProto):
        raise BatchError(f"data must be a DataProto, got {type(data).__name__}")
    added = pad_indices(len(data), size_divisor)
    if len(data) == 0:
        logger.warning("a batch without rows is not padded")
    if not added:
        return data, 0
    return data.select_idxs([*range(len(data)), *added]), len(added)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows; the result is a view."""
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape (B, ...) to (new, B / new, ...) in all entries, as views where possible.

    Raises: ValueError, which is also an AssertionError, when B does not divide evenly.
    """
    if new_batch_size <= 0 or len(data) % new_batch_size != 0:
        raise BatchError(f"{len(data)} rows do not fold into {new_batch_size}")
    inner = len(data) // new_batch_size
    return _reshaped(data, lambda value: value.reshape(new_batch_size, inner, *value.shape[1:]), new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the leading ``batch_dims`` dims of all entries into one, as views where possible."""
    entries = [*(data.batch.values() if data.batch is not None else ()), *data.non_tensor_batch.values()]
    leading = {tuple(value.shape[:batch_dims]) for value in entries}
    if len(leading) > 1 or any(len(shape) < batch_dims for shape in leading):
        raise BatchError(f"entries must agree in their first {batch_dims} dims, got {sorted(leading)}")
    size = int(np.prod(leading.pop())) if leading else 0
    return _reshaped(data, lambda value: value.reshape(size, *value.shape[batch_dims:]), size)


def _reshaped(data: DataProto, reshape: Callable[[Any], Any], num_rows: int) -> DataProto:
    batch = None
    if data.batch is not None:
        batch = data._rebuilt({key: reshape(value) for key, value in data._tensors().items()}, num_rows)
    return data._with(batch, {key: reshape(value) for key, value in data.non_tensor_batch.items()})


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Give every rank the rows of all ranks, in rank order, in place; collective. Row counts may differ."""
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, (len(data), data.non_tensor_batch), group=process_group)
    counts = [count for count, _ in parts]
    if data.batch is not None:
        home = data.batch.device
        tensors = {
            key: all_gather_rows(data.batch[key].to(get_device_id()), counts, process_group).to(data.batch[key].device)
            for key in sorted(data.batch.keys())
        }
        data.batch = TensorDict(tensors, batch_size=[sum(counts)], device=home)
    data.non_tensor_batch = concat_entries([arrays for _, arrays in parts], concat_arrays)


@dataclass
class DataProtoFuture:
    """The result of a call that is still running; it can be handed to the next call as it is.

    ``wait_fn`` applies the rules of the worker group that made the call. It stays behind when the future is sent to
    another process, which waits for at most ``timeout_s``. A worker group sends the results along with a future, as
    dependencies of the call: ``futures`` holds values then, and nobody waits.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: "list[ObjectRef[DataProto]]"
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    wait_fn: "Callable[[list[ObjectRef[DataProto]]], list[DataProto]] | None" = None
    timeout_s: float | None = None

    @staticmethod
    def concat(data: "list[ObjectRef[DataProto]]") -> "DataProtoFuture":
        """Return a future of the concatenated results."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Return futures of the parts; each collects everything and takes its own part."""

        def part(index: int) -> DataProtoFuture:
            before = self.dispatch_fn

            def dispatch(data: DataProto) -> DataProto:
                return (before(data) if before is not None else data).chunk(chunks)[index]

            return DataProtoFuture(self.collect_fn, self.futures, dispatch, self.wait_fn, self.timeout_s)

        return [part(index) for index in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the results, collect them, and take this future's part.

        Raises: ValueError, which is also an AssertionError, when a result is no DataProto.
        """
        import ray

        outputs: list[Any]
        if all(isinstance(value, DataProto) for value in self.futures):
            outputs = list(self.futures)
        elif self.wait_fn is not None:
            outputs = self.wait_fn(self.futures)
        else:
            outputs = ray.get(self.futures, timeout=self.timeout_s)
        for output in outputs:
            if not isinstance(output, DataProto):
                raise BatchError(f"a future must hold DataProto, got {type(output).__name__}")
        data = self.collect_fn(outputs)
        return data if self.dispatch_fn is None else self.dispatch_fn(data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "wait_fn": None}
