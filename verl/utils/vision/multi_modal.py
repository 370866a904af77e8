"""Images and their tensors on the way from the driver to the workers: once per prompt, by reference.

A row holds two objects that are never mixed up: ``multi_modal_data`` (what a generation engine takes:
``{"image": [PIL, ...], "video": [...]}``) and ``multi_modal_inputs`` (what the training model takes: the tensors of the
processor). The driver puts each once into Ray's object store; batches carry a handle, which is repeated, sliced and
sent instead.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from verl.utils.batch.dicts import object_array
from verl.utils.batch.serialization import pack_objects
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.ray_utils import parallel_put

if TYPE_CHECKING:
    from verl.protocol import DataProto

MULTI_MODAL_KEYS = ("multi_modal_data", "multi_modal_inputs")
CACHE_BYTES = 1 << 30  # of what a worker keeps between the phases of a step


@dataclass(frozen=True)
class SharedRow:
    """A handle to a row's object in Ray's object store, which holds it as long as there is a handle.

    The grids of images and videos stay in the handle, so that the driver can count patches; ``batch`` counts the
    batches whose rows were put, so that workers know which are past.
    """

    ref: Any
    num_bytes: int
    grids: Mapping[str, Any] = field(default_factory=dict, compare=False)
    batch: int = field(default=0, compare=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return one of the grids, as the object itself would."""
        return self.grids.get(name, default)


def share(batch: "DataProto") -> "DataProto":
    """Replace the multi-modal objects of a batch by handles, in place; the same object gets the same handle.

    Without a running Ray the objects stay where they are.
    """
    import ray

    if not ray.is_initialized():
        return batch
    number = next(_BATCHES)
    for key in MULTI_MODAL_KEYS:
        if key in batch.non_tensor_batch:
            batch.non_tensor_batch[key] = _shared(batch.non_tensor_batch[key], number)
    return batch


_BATCHES = itertools.count(1)


def _shared(rows: np.ndarray, number: int) -> np.ndarray:
    """Return handles in the place of the rows that hold something; those that are empty stay what they are."""
    distinct = {id(row): row for row in rows if row and not isinstance(row, SharedRow)}
    if not distinct:
        return rows
    refs = parallel_put([pack_objects(row) for row in distinct.values()], max_workers=4)
    handles = {
        key: SharedRow(ref, num_bytes(row), _grids(row), number)
        for (key, row), ref in zip(distinct.items(), refs, strict=True)
    }
    return object_array([handles.get(id(row), row) for row in rows])


def _grids(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.endswith("_grid_thw")}


def shared_bytes(batch: "DataProto") -> int:
    """Return the bytes behind the handles of a batch, each counted once."""
    handles = {
        row for key in MULTI_MODAL_KEYS for row in batch.non_tensor_batch.get(key, ()) if isinstance(row, SharedRow)
    }
    return sum(handle.num_bytes for handle in handles)


def count_shared_bytes(batch: "DataProto", metrics: dict[str, Any]) -> None:
    """Add the bytes that a batch has put into the object store to ``multi_modal/bytes_put``."""
    if put := shared_bytes(batch):
        metrics["multi_modal/bytes_put"] = metrics.get("multi_modal/bytes_put", 0.0) + put


class _Cache:
    """What this process fetched of the newest batch, up to ``CACHE_BYTES``, and how many bytes came since they were
    asked for. A row that it keeps is kept in the object store as well, so a newer batch takes the place of all others.
    """

    def __init__(self) -> None:
        self.rows: OrderedDict[SharedRow, Any] = OrderedDict()
        self.size = 0
        self.fetched = 0
        self.newest = 0

    def get(self, handles: Sequence[SharedRow]) -> dict[SharedRow, Any]:
        """Return the objects of distinct handles; those that are not here are fetched together."""
        import ray

        newest = max((handle.batch for handle in handles), default=0)
        if newest > self.newest:
            self.rows.clear()
            self.newest, self.size = newest, 0
        found = {handle: self.rows[handle] for handle in handles if handle in self.rows}
        absent = [handle for handle in handles if handle not in found]
        if absent:
            found |= dict(zip(absent, ray.get([handle.ref for handle in absent]), strict=True))
            self.fetched += sum(handle.num_bytes for handle in absent)
        for handle in handles:
            self.keep(handle, found[handle])
        return found

    def keep(self, handle: SharedRow, row: Any) -> None:
        """Take an object as the newest and let the oldest go."""
        if self.rows.pop(handle, None) is None:
            self.size += handle.num_bytes
        self.rows[handle] = row
        while self.size > CACHE_BYTES and self.rows:
            oldest, _ = self.rows.popitem(last=False)
            self.size -= oldest.num_bytes


_CACHE = _Cache()


def resolve(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the objects of the rows in their order; plain ones pass, and rows of one handle get one object.

    What is returned is shared between rows and calls: read it, do not write into it.
    """
    rows = list(rows)
    found = _CACHE.get(list(dict.fromkeys(row for row in rows if isinstance(row, SharedRow))))
    return [found[row] if isinstance(row, SharedRow) else dict(row or {}) for row in rows]


def take_fetched_bytes() -> int:
    """Return the bytes that this process has fetched since the last call."""
    fetched, _CACHE.fetched = _CACHE.fetched, 0
    return fetched


def concat_multi_modal_inputs(rows: Iterable[Any]) -> dict[str, Any]:
    """Join the processor's tensors of the rows along dim 0, in row order; handles are resolved."""
    return extract_multi_modal_inputs(resolve(rows))


def concat_distinct_inputs(rows: Iterable[Any]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Join the processor's tensors of the rows, those that several rows share only once; handles are resolved.

    Returns: the tensors, and by the name of each grid which of its joined entries the rows show, in row order.
    """
    rows = list(rows)
    keys = [row if isinstance(row, SharedRow) else id(row) for row in rows]
    distinct = dict(zip(keys, rows, strict=True))
    objects = dict(zip(distinct, resolve(distinct.values()), strict=True))
    joined = extract_multi_modal_inputs(list(objects.values()))
    return joined, {name: _entries(keys, objects, name) for name in joined if name.endswith("_grid_thw")}


def _entries(keys: Sequence[Any], objects: Mapping[Any, Mapping[str, Any]], name: str) -> list[int]:
    """Return for every row in turn the places of its entries in the joined tensor ``name``."""
    places: dict[Any, range] = {}
    start = 0
    for key, row in objects.items():
        stop = start + (0 if row.get(name) is None else len(row[name]))
        places[key], start = range(start, stop), stop
    return [place for key in keys for place in places[key]]


def num_bytes(value: Any) -> int:
    """Return the size of the arrays, tensors and images in a nested object."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * len(value.getbands()))
    return 0
