"""Operations on the dicts of arrays and free values in a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from verl.utils.py_functional import ConflictError, deep_equal, union_two_dict
from verl.utils.tensordict_utils import BatchError

Value = TypeVar("Value")


union_numpy_dict = union_two_dict


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
    """Turn dicts with the same keys into one dict of lists.

    Raises: ValueError, which is also an AssertionError, when the keys of a dict differ from those of the first.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for entry in list_of_dict:
        if entry.keys() != keys:
            raise BatchError(f"all dicts must have the keys {sorted(keys)}, got {sorted(entry.keys())}")
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def object_array(values: Sequence[Value]) -> np.ndarray:
    """Return a one-dim array of objects; lists of equal length stay lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def rows_as_objects(key: str, values: Any) -> np.ndarray:
    """Return one value per row as an array of objects.

    Raises: ValueError, which is also an AssertionError, for a string, a mapping or a value without length.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise BatchError(f"non_tensors[{key!r}] must hold one value per row, got a {type(values).__name__}")
    return object_array(values)


def pick(kind: str, entries: dict[str, Value], keys: Sequence[str] | None) -> dict[str, Value]:
    """Return the entries of the given keys; None means all.

    Raises: KeyError naming the missing keys.
    """
    if keys is None:
        return dict(entries)
    missing = [key for key in keys if key not in entries]
    if missing:
        raise KeyError(f"keys {missing} are not in {kind}; it has {sorted(entries)}")
    return {key: entries[key] for key in keys}


def as_key_list(name: str, keys: str | Sequence[str] | None) -> list[str]:
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
        raise BatchError(f"parts of {key!r} differ in their row shapes: {[part.shape for part in parts]}")
    return np.concatenate(parts, axis=0)


def concat_entries(parts: Sequence[dict[str, Value]], join: Callable[[str, list[Value]], Value]) -> dict[str, Value]:
    """Join the values of each key over dicts with the same keys."""
    keys = parts[0].keys()
    for number, part in enumerate(parts):
        if part.keys() != keys:
            raise BatchError(f"part {number} and part 0 differ in the keys {sorted(part.keys() ^ keys)}")
    return {key: join(key, [part[key] for part in parts]) for key in keys}


def merge_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge dicts; the values of ``metrics`` become one dict of lists.

    Raises: ValueError, which is also an AssertionError, when another key holds different values.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == "metrics":
                metrics.extend(value) if isinstance(value, list) else metrics.append(value)
            elif key in merged and not deep_equal(merged[key], value):
                raise ConflictError(
                    f"meta_info[{key!r}] of part {number} is {value!r}, an earlier part has {merged[key]!r}"
                )
            else:
                merged.setdefault(key, value)
    if any("metrics" in part for part in parts):
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged
