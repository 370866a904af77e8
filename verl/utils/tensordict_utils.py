"""Operations on TensorDicts with tensors and non-tensor values."""

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from verl.errors import ContractError
from verl.utils.import_utils import lazy_exports
from verl.utils.numerics import host_memory
from verl.utils.py_functional import deep_equal, tensors_equal

_FOR_FORKS = (
    "assign_non_tensor",
    "unwrap_non_tensor_data",
    "get_non_tensor_data",
    "assert_tensordict_eq",
    "pad_to_divisor",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.tensordict_utils"))

logger = logging.getLogger(__name__)

T = TypeVar("T")
Indices = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set one value that all rows share."""
    if not isinstance(key, str):
        raise ContractError(f"a key must be a string, got {key!r}")
    tensor_dict[key] = val if isinstance(val, NonTensorData) else NonTensorData(val)


def assign_non_tensor_dict(tensor_dict: TensorDict, non_tensor_dict: Mapping[str, Any]) -> TensorDict:
    """Set every value of a dict as ``NonTensorData``, and return the TensorDict."""
    for key, value in non_tensor_dict.items():
        assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def get_tensordict(
    tensor_dict: Mapping[str, Tensor | list[Any]], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """Build a TensorDict from tensors, lists with one element per row, and values that all rows share.

    Raises: ValueError, which is also an AssertionError, when row counts differ, a key is in both parts or a list
    holds tensors.
    """
    shared = non_tensor_dict or {}
    both = tensor_dict.keys() & shared.keys()
    if both:
        raise ContractError(f"keys {sorted(both)} are given both per row and for all rows")
    entries: dict[str, Tensor | NonTensorStack] = {}
    sizes: dict[str, int] = {}
    for key, value in tensor_dict.items():
        if isinstance(value, list):
            if any(isinstance(item, Tensor) for item in value):
                raise ContractError(f"list {key!r} holds tensors: stack them, or make a nested tensor of them")
            value = NonTensorStack(*[NonTensorData(item) for item in value])
        elif not isinstance(value, Tensor | NonTensorStack):
            raise ContractError(f"entry {key!r} must be a tensor or a list, got {type(value).__name__}")
        entries[key] = value
        sizes[key] = value.size(0) if isinstance(value, Tensor) else len(value)
    if len(set(sizes.values())) > 1:
        raise ContractError(f"entries must have the same number of rows, got {sizes}")
    batch_size = [next(iter(sizes.values()))] if sizes else []
    return assign_non_tensor_dict(TensorDict(entries, batch_size=batch_size), shared)


def shared_rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of rows that all tensors have.

    Raises: ValueError, which is also an AssertionError, when the numbers differ or a tensor has no dim.
    """
    for key, value in tensors.items():
        if not isinstance(value, Tensor) or value.dim() < 1:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ContractError(f"tensors[{key!r}] must be a tensor with a batch dim, got {found}")
    rows = {key: value.shape[0] for key, value in tensors.items()}
    if len(set(rows.values())) > 1:
        raise ContractError(f"tensors must agree in their first dim, got {rows}")
    return next(iter(rows.values()))


def repeat_counts(counts: Indices, num_rows: int) -> Tensor:
    """Return the repeat count of each row, as int64.

    Raises: ValueError, which is also an AssertionError, unless there is one whole, non-negative count per row.
    """
    given = torch.as_tensor(counts)
    if given.shape != (num_rows,):
        raise ContractError(f"repeat_times must hold one count per row ({num_rows}), got shape {tuple(given.shape)}")
    whole = given.long().cpu()
    if bool((whole != given.cpu()).any() or (whole < 0).any()):
        raise ContractError(f"repeat_times must be whole and not negative, got {given.tolist()}")
    return whole


def resolve_indices(indices: Indices, num_rows: int) -> Tensor:
    """Turn integers or a boolean mask into int64 row numbers from 0 to ``num_rows`` - 1.

    Raises: IndexError when an index is out of range or a mask has another length; TypeError for other dtypes.
    """
    index = torch.as_tensor(indices)
    if index.dim() != 1:
        raise IndexError(f"row indices must have one dim, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise IndexError(f"a mask of {len(index)} rows does not fit a batch of {num_rows}")
        return index.nonzero().squeeze(1)
    if index.is_floating_point() and index.numel() == 0:
        return index.long()  # an empty list
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"row indices must be integers or booleans, got {index.dtype}")
    index = index.long()
    outside = (index < -num_rows) | (index >= num_rows)
    if bool(outside.any()):
        raise IndexError(f"row index {int(index[outside][0])} is out of range for {num_rows} rows")
    return torch.where(index < 0, index + num_rows, index)


def take_rows(value: Any, index: Tensor) -> Any:
    """Gather rows of a dense or jagged tensor, a ``NonTensorStack`` or a nested TensorDict."""
    if isinstance(value, NonTensorData):
        return value
    if isinstance(value, NonTensorStack):
        items = value.tolist()
        return NonTensorStack(*[NonTensorData(items[i]) for i in index.tolist()])
    if not isinstance(value, Tensor):
        return value[index]
    if value.is_nested:
        parts = value.unbind()
        return torch.nested.as_nested_tensor([parts[i] for i in index.tolist()], layout=value.layout)
    if not _is_plain(value):
        return value.index_select(0, index.to(value.device))
    rows = host_memory.empty((len(index), *value.shape[1:]), value.dtype)
    return torch.index_select(value, 0, index.to(value.device), out=rows)


def _is_plain(value: Tensor) -> bool:
    """Whether the result of an operation may be written to memory of the caller's choice."""
    ordinary = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    return ordinary and value.dim() > 0 and not value.requires_grad


def index_select_tensor_dict(batch: TensorDict | None, indices: Indices) -> TensorDict | None:
    """Gather rows by a one-dim index; values that all rows share are kept.

    Raises: IndexError when an index is out of range.
    """
    return None if batch is None else select_rows(batch, indices)


def select_rows(batch: TensorDict, indices: Indices) -> TensorDict:
    """Return the rows of a TensorDict by their indices, in the order of the indices."""
    index = resolve_indices(indices, batch.batch_size[0])
    rows = {key: take_rows(value, index) for key, value in batch.items()}
    return TensorDict(rows, batch_size=[len(index)], device=batch.device)


def entries_equal(a: Tensor | TensorDict | NonTensorData, b: Tensor | TensorDict | NonTensorData) -> bool:
    """Compare two entries of a TensorDict by type and value, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return tensors_equal(a, b)
    if isinstance(a, NonTensorStack) and isinstance(b, NonTensorStack):
        return deep_equal(a.tolist(), b.tolist())
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return deep_equal(a.data, b.data)
    if isinstance(a, TensorDict) and isinstance(b, TensorDict):
        return a.keys() == b.keys() and all(entries_equal(a.get(key), b.get(key)) for key in a.keys())
    return False


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the entries of the second TensorDict to the first and return it; nothing changes when they conflict.

    Raises: ValueError, which is also an AssertionError, when row counts differ or a shared key holds other values.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise ContractError(
            "parts to merge must have the same batch size, got "
            f"{list(tensor_dict1.batch_size)} and {list(tensor_dict2.batch_size)}"
        )
    for key in tensor_dict2.keys():
        if key in tensor_dict1.keys() and not entries_equal(tensor_dict1.get(key), tensor_dict2.get(key)):
            raise ContractError(f"key {key!r} holds different values in the two parts")
    for key in tensor_dict2.keys():
        if key not in tensor_dict1.keys():
            tensor_dict1[key] = tensor_dict2.get(key)
    return tensor_dict1


_SET_BY_ITERATOR = ("dataset", "batch_size", "batch_sampler", "collate_fn")
_LOADER_OPTIONS = [name for name in inspect.signature(DataLoader).parameters if name not in _SET_BY_ITERATOR]


def mini_batch_indices(
    num_rows: int, mini_batch_size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[slice | Tensor]:
    """Yield the rows of each mini-batch: slices in order, or a new permutation per epoch.

    The permutations depend only on ``seed``, or on ``generator`` of the options; without both they come from torch's
    global generator. ``sampler`` of the options orders the rows instead. Every other option of a ``DataLoader`` is
    accepted and changes nothing, since the rows are in the memory of this process.

    Raises: ValueError, which is also an AssertionError, when rows do not divide evenly or an option is unknown.
    """
    options = dict(dataloader_kwargs or {})
    if unknown := sorted(options.keys() - set(_LOADER_OPTIONS)):
        raise ContractError(f"dataloader_kwargs has {unknown}: it takes {', '.join(_LOADER_OPTIONS)}")
    shuffle = options.get("shuffle", False)
    sampler = options.get("sampler")
    if shuffle and sampler is not None:
        raise ContractError("dataloader_kwargs has shuffle=True and a sampler, which orders the rows: leave out one")
    if mini_batch_size <= 0 or num_rows % mini_batch_size != 0:
        raise ContractError(f"{num_rows} rows do not divide into mini-batches of {mini_batch_size}")
    generator = options.get("generator")
    if generator is None and seed is not None:
        generator = torch.Generator().manual_seed(seed)

    def order_of_epoch() -> Tensor | None:
        if sampler is None:
            return torch.randperm(num_rows, generator=generator) if shuffle else None
        order = resolve_indices(list(sampler), num_rows)
        if len(order) % mini_batch_size != 0:
            raise ContractError(
                f"the {len(order)} rows of the sampler do not divide into mini-batches of {mini_batch_size}"
            )
        return order

    def rows() -> Iterator[slice | Tensor]:
        for _ in range(epochs):
            order = order_of_epoch()
            for start in range(0, num_rows if order is None else len(order), mini_batch_size):
                part = slice(start, start + mini_batch_size)
                yield part if order is None else order[part]

    return rows()


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Iterate over mini-batches ``epochs`` times; rows in order are views, shuffled rows are copies.

    Raises: ValueError, which is also an AssertionError, when rows do not divide evenly.
    """
    rows = mini_batch_indices(tensordict.batch_size[0], mini_batch_size, epochs, seed, dataloader_kwargs)
    return (_rows_of(tensordict, part) for part in rows)


def _rows_of(tensordict: TensorDict, rows: slice | Tensor) -> TensorDict:
    if isinstance(rows, slice):
        if not any(isinstance(value, Tensor) and value.is_nested for value in tensordict.values()):
            return tensordict[rows]
        rows = torch.arange(*rows.indices(tensordict.batch_size[0]))
    return select_rows(tensordict, rows)


def pop(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Remove keys and return them as a TensorDict.

    Raises: KeyError when a key is missing; the batch is then unchanged.
    """
    wanted = list(keys)
    missing = [key for key in wanted if key not in tensordict.keys()]
    if missing:
        raise KeyError(f"keys {missing} are not in the batch; it has {sorted(tensordict.keys())}")
    rows: dict[str, Tensor | list[Any]] = {}
    shared: dict[str, NonTensorData] = {}
    for key in wanted:
        value = tensordict.get(key)
        tensordict.del_(key)
        if isinstance(value, NonTensorData):
            shared[key] = value
        else:
            rows[key] = value.tolist() if isinstance(value, NonTensorStack) else value
    return get_tensordict(rows, shared)


def pad_indices(num_rows: int, size_divisor: int) -> list[int]:
    """Return the rows to repeat, cycling from the head, to make the row count divisible."""
    if size_divisor <= 0:
        raise ContractError(f"size_divisor must be positive, got {size_divisor}")
    if num_rows == 0:
        return []
    return [i % num_rows for i in range(-num_rows % size_divisor)]


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Drop the last ``pad_size`` rows."""
    return data if pad_size == 0 else _rows_of(data, slice(0, data.batch_size[0] - pad_size))


def concat_tensors(key: str, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows with one allocation; a single part is returned unchanged.

    Raises: ValueError, which is also an AssertionError, naming the key when shapes or dtypes differ.
    """
    if len(parts) == 1:
        return parts[0]
    if any(part.is_nested for part in parts):
        rows = [row for part in parts for row in part.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=parts[0].layout)
    shapes = {tuple(part.shape[1:]) for part in parts}
    dtypes = {part.dtype for part in parts}
    if len(shapes) > 1 or len(dtypes) > 1:
        raise ContractError(f"parts of {key!r} differ: row shapes {sorted(shapes)}, dtypes {sorted(map(str, dtypes))}")
    if not all(map(_is_plain, parts)):
        return torch.cat(list(parts), dim=0)
    joined = host_memory.empty((sum(len(part) for part in parts), *shapes.pop()), dtypes.pop())
    return torch.cat(list(parts), dim=0, out=joined)


def all_gather_rows(tensor: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks in rank order; ``counts`` holds the row count of each. Collective."""
    most = max(counts)
    padded = tensor.contiguous()
    if len(tensor) < most:
        padded = torch.cat([padded, padded.new_zeros(most - len(tensor), *tensor.shape[1:])])
    gathered = padded.new_empty(len(counts) * most, *tensor.shape[1:])
    # As bytes, because backends do not support every dtype.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(gathered.view(-1).view(torch.uint8), padded.view(-1).view(torch.uint8), group=group)
    if min(counts) == most:
        return gathered
    return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(counts)])
