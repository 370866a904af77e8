"""Transport of images and their tensors from the driver to the workers: once per prompt, by reference.

A row holds ``multi_modal_data`` for the rollout engine (``{"image": [PIL, ...], "video": [...]}``) and
``multi_modal_inputs``, the processor's tensors, for the training model. Copies of a batch are repeated, sliced and sent
many times in a step, and images would dominate their size. So the driver puts each object into Ray's object store once,
and batches carry handles.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from verl.utils.batch.serialization import pack_objects
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.py_functional import object_array
from verl.utils.ray_utils import parallel_put

if TYPE_CHECKING:
    from ray import ObjectRef

MULTI_MODAL_KEYS = ("multi_modal_data", "multi_modal_inputs")
GRID_SUFFIXES = ("_grid_thw", "_grid_hws")
"""Endings of the keys whose value has a row for each image or video: its sizes in patches, with frames or without."""
CACHE_BYTES = 1 << 30  # limit of a worker's cache between the phases of a step

RowObject = Mapping[str, Any]
"""The ``multi_modal_data`` or ``multi_modal_inputs`` of a row."""


Columns = dict[str, np.ndarray]
"""The non-tensor columns of a batch."""


@dataclass(frozen=True)
class SharedRow:
    """A handle to a row's object in Ray's object store, which keeps the object as long as a handle exists.

    The handle holds the grids of images and videos, from which the driver counts patches. ``batch`` numbers the
    batches that were shared, so that workers can drop older ones.
    """

    ref: "ObjectRef[RowObject]"
    num_bytes: int
    grids: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    batch: int = field(default=0, compare=False)

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        """Return one of the grids, as the object itself would."""
        return self.grids.get(name, default)


def share(columns: Columns) -> None:
    """Replace the multi-modal objects of a batch by handles, in place; the same object gets the same handle.

    Without a running Ray the objects stay in the batch.
    """
    import ray

    if not ray.is_initialized():
        return
    number = next(_BATCHES)
    for key in MULTI_MODAL_KEYS:
        if key in columns:
            columns[key] = _shared(columns[key], number)


def replace_inputs(columns: Columns, rows: np.ndarray) -> None:
    """Replace ``multi_modal_inputs`` of the rows for which ``rows`` has an entry; None keeps the data set's inputs."""
    new = {"multi_modal_inputs": rows}
    share(new)
    old = columns.get("multi_modal_inputs", [None] * len(rows))
    pairs = zip(old, new["multi_modal_inputs"], strict=True)
    columns["multi_modal_inputs"] = object_array([was if now is None else now for was, now in pairs])


_BATCHES = itertools.count(1)


def _shared(rows: np.ndarray, number: int) -> np.ndarray:
    """Replace the non-empty rows by handles."""
    distinct = {id(row): row for row in rows if row and not isinstance(row, SharedRow)}
    if not distinct:
        return rows
    refs = parallel_put([pack_objects(row) for row in distinct.values()], max_workers=4)
    handles = {
        key: SharedRow(ref, num_bytes(row), {name: row[name] for name in row if name.endswith("_grid_thw")}, number)
        for (key, row), ref in zip(distinct.items(), refs, strict=True)
    }
    return object_array([handles.get(id(row), row) for row in rows])


def shared_bytes(columns: Columns) -> int:
    """Return the bytes behind the handles of a batch; each handle counts once."""
    handles = {row for key in MULTI_MODAL_KEYS for row in columns.get(key, ()) if isinstance(row, SharedRow)}
    return sum(handle.num_bytes for handle in handles)


def count_shared_bytes(columns: Columns, metrics: dict[str, Any]) -> None:
    """Add the bytes of a batch in the object store to the metric ``multi_modal/bytes_put``."""
    if put := shared_bytes(columns):
        metrics["multi_modal/bytes_put"] = metrics.get("multi_modal/bytes_put", 0.0) + put


@dataclass
class _Cache:
    """The rows of the newest batch that this process has fetched, up to ``CACHE_BYTES``.

    A cached row stays in the object store too, so a newer batch evicts all older ones. ``fetched`` counts the bytes
    since ``take_fetched_bytes``.
    """

    rows: OrderedDict[SharedRow, RowObject] = field(default_factory=OrderedDict)
    size: int = 0
    fetched: int = 0
    newest: int = 0

    def get(self, handles: Sequence[SharedRow]) -> dict[SharedRow, RowObject]:
        """Return the objects of distinct handles; missing ones are fetched together."""
        import ray

        newest = max((handle.batch for handle in handles), default=0)
        if newest > self.newest:
            self.rows.clear()
            self.newest = newest
            self.size = 0
        found = {handle: self.rows[handle] for handle in handles if handle in self.rows}
        absent = [handle for handle in handles if handle not in found]
        if absent:
            found |= dict(zip(absent, ray.get([handle.ref for handle in absent]), strict=True))
            self.fetched += sum(handle.num_bytes for handle in absent)
        for handle in handles:
            self.keep(handle, found[handle])
        return found

    def keep(self, handle: SharedRow, row: RowObject) -> None:
        """Add an object as the newest, and evict the oldest until the limit holds."""
        if self.rows.pop(handle, None) is None:
            self.size += handle.num_bytes
        self.rows[handle] = row
        while self.size > CACHE_BYTES and self.rows:
            oldest, _ = self.rows.popitem(last=False)
            self.size -= oldest.num_bytes


_CACHE = _Cache()


def resolve(rows: Iterable[SharedRow | RowObject | None]) -> list[RowObject]:
    """Return the object of each row; plain objects pass through, and rows with one handle get one object.

    Objects are shared between rows and calls, so treat them as read-only.
    """
    rows = list(rows)
    found = _CACHE.get(list(dict.fromkeys(row for row in rows if isinstance(row, SharedRow))))
    return [found[row] if isinstance(row, SharedRow) else dict(row or {}) for row in rows]


def take_fetched_bytes() -> int:
    """Return the bytes that this process has fetched since the last call."""
    fetched = _CACHE.fetched
    _CACHE.fetched = 0
    return fetched


def count_fetched(rows: Iterable[SharedRow | RowObject | None]) -> None:
    """Add the bytes of distinct handles that another process of this engine fetches to those of this process."""
    _CACHE.fetched += sum(row.num_bytes for row in {row for row in rows if isinstance(row, SharedRow)})


def concat_multi_modal_inputs(rows: Iterable[SharedRow | RowObject | None]) -> dict[str, Any]:
    """Join the processor's tensors of the rows along dim 0, in row order; handles are resolved."""
    return extract_multi_modal_inputs(resolve(rows))


def names_of_inputs(rows: "Iterable[SharedRow | RowObject | None]") -> list[SharedRow | int]:
    """Return a name for each row's media objects; rows that share an object have equal names."""
    return [row if isinstance(row, SharedRow) else id(row) for row in rows]


def concat_distinct_inputs(rows: Iterable[SharedRow | RowObject | None]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Join the processor's tensors of the rows, each shared object once; handles are resolved.

    Returns: the tensors, and for each grid the indices of the joined entries that the rows show, in row order.
    """
    rows = list(rows)
    keys = names_of_inputs(rows)
    distinct = dict(zip(keys, rows, strict=True))
    objects = dict(zip(distinct, resolve(distinct.values()), strict=True))
    joined = extract_multi_modal_inputs(list(objects.values()))
    return joined, {name: _entries(keys, objects, name) for name in joined if name.endswith(GRID_SUFFIXES)}


def _entries(keys: Sequence[SharedRow | int], objects: Mapping[SharedRow | int, RowObject], name: str) -> list[int]:
    """Return the indices of each row's entries in the joined tensor ``name``."""
    places: dict[SharedRow | int, range] = {}
    start = 0
    for key, row in objects.items():
        stop = start + (0 if row.get(name) is None else len(row[name]))
        places[key] = range(start, stop)
        start = stop
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
