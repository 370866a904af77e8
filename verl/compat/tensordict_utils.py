"""Helpers under the established names of ``verl.utils.tensordict_utils``, for trainers of users' forks."""

import logging
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from verl.errors import ContractError
from verl.utils.tensordict_utils import assign_non_tensor_dict, entries_equal, pad_indices, select_rows

logger = logging.getLogger(__name__)


def assign_non_tensor(tensordict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set every keyword as ``NonTensorData``, and return the TensorDict."""
    return assign_non_tensor_dict(tensordict, kwargs)


def unwrap_non_tensor_data(data: Any) -> Any:
    """Return the value in a ``NonTensorData``; other values are returned unchanged."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """Return the unwrapped value of a key, or ``default``."""
    return unwrap_non_tensor_data(data.get(key, default))


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Assert that two TensorDicts hold the same keys, types and values."""
    different = set(tensordict1.keys()) ^ set(tensordict2.keys())
    assert not different, f"keys differ: {sorted(different)}"
    for key in sorted(tensordict1.keys()):
        a = tensordict1.get(key)
        b = tensordict2.get(key)
        assert type(a) is type(b), f"types of {key!r} differ: {type(a).__name__} and {type(b).__name__}"
        assert entries_equal(a, b), f"values of {key!r} differ"


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeat rows from the head until the row count is divisible; return the result and the number of added rows."""
    if not isinstance(data, TensorDict):
        raise ContractError(f"data must be a TensorDict, got {type(data).__name__}")
    num_rows = data.batch_size[0]
    added = pad_indices(num_rows, size_divisor)
    if num_rows == 0:
        logger.warning("an empty TensorDict is not padded")
    if not added:
        return data, 0
    return select_rows(data, torch.tensor([*range(num_rows), *added])), len(added)
