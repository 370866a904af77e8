"""Collate, pad and fold the rows of a batch."""

import logging

import numpy as np
import torch

from verl.protocol.data_proto import DataProto, DataProtoItem
from verl.utils.batch.dicts import object_array
from verl.utils.tensordict_utils import BatchError, pad_indices

logger = logging.getLogger(__name__)


def collate_fn(items: list[DataProtoItem]) -> DataProto:
    """Stack rows into a batch with the meta_info of the first."""
    if not items:
        raise BatchError("collate_fn needs at least one row")
    first = items[0]
    rows = [item.batch for item in items if item.batch is not None]
    tensors = {}
    if first.batch is not None:
        tensors = {str(key): torch.stack([row[key] for row in rows]) for key in first.batch.keys()}
    arrays = {key: object_array([item.non_tensor_batch[key] for item in items]) for key in first.non_tensor_batch}
    return DataProto.from_dict(tensors, arrays, first.meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the head until the row count is divisible; return the batch and the number of added rows."""
    if not isinstance(data, DataProto):
        raise BatchError(f"data must be a DataProto, got {type(data).__name__}")
    added = pad_indices(len(data), size_divisor)
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
        raise BatchError(f"{len(data)} rows do not fold into {new_batch_size}")
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
        raise BatchError(f"entries must agree in their first {batch_dims} dims, got {sorted(leading)}")
    size = int(np.prod(leading.pop())) if leading else 0
    return data.map_entries(
        size,
        lambda _, tensor: tensor.reshape(size, *tensor.shape[batch_dims:]),
        lambda _, array: array.reshape(size, *array.shape[batch_dims:]),
    )
