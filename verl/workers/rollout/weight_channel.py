"""Buckets of weights between the trainer's rank 0 and the engine of a server in another process.

On one node of CPUs a bucket goes through shared memory. Elsewhere a process group of the trainer's rank 0 and the
workers of one engine broadcasts its tensors; each engine has its own group, so that the loss of one engine does not
disturb the others. Sender and receiver compute the checksum of each tensor.
"""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export its type
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from verl.utils import envs
from verl.utils.distributed import listening_store
from verl.utils.net_utils import PORT_RANGE, get_free_port

Bucket = Sequence[tuple[str, Tensor]]
Layout = list[list[Any]]
"""Name, dtype, and shape of each tensor of a bucket: plain values, which any serializer takes."""

_ALIGNMENT = 64


class Meeting(TypedDict):
    """The fields of ``Rendezvous`` in a form that a call can carry."""

    host: str
    port: int
    size: int
    backend: str
    timeout_s: float


class Received(TypedDict):
    """The outcome of an update of the weights of an engine.

    ``checksums`` are those of the tensors that arrived, None where ranks differ; ``unverified`` counts those that could
    not be read back; ``dtypes`` are those of the parameters that took them by plain copies.
    """

    checksums: Mapping[str, int | None]
    unverified: int
    dtypes: Mapping[str, str | None]


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a process group meet: the address of its store, their number, and the backend."""

    host: str
    port: int
    size: int
    backend: str
    timeout_s: float


def layout_of(bucket: Bucket) -> Layout:
    """Describe the tensors of a bucket for ``receive``."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the name of a dtype for a message."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def common_dtypes(found: Iterable[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Return for each tensor the dtype in which all holders have it; None if they differ or a holder does not know."""
    everywhere: dict[str, set[str | None]] = {}
    for each in found:
        for name, dtype in each.items():
            everywhere.setdefault(name, set()).add(dtype)
    return {name: next(iter(dtypes)) if len(dtypes) == 1 else None for name, dtypes in everywhere.items()}


def known_dtypes(found: Mapping[str, str | None]) -> dict[str, torch.dtype]:
    """Return the dtypes that are known."""
    return {name: getattr(torch, dtype) for name, dtype in found.items() if dtype is not None}


def _empty(dtype: str, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a vector of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class SharedMemory:
    """Memory without a name in the file system, which disappears with this process; others of its node can read it."""

    def __init__(self) -> None:
        # A file without a name cannot be left behind: the system frees it with the last process that has it open.
        self._file = os.memfd_create("verl-weights")
        self._size = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def fill(self, bucket: Bucket) -> None:
        """Overwrite the memory with the tensors of a bucket."""
        places, size = _places(layout_of(bucket))
        if size > self._size:
            # Never shrink the file: readers map only the part that their layout needs.
            os.ftruncate(self._file, size)
            self._size = size
        with mmap.mmap(self._file, max(size, 1)) as memory:
            view = torch.frombuffer(memory, dtype=torch.uint8)
            for (_, tensor), start in zip(bucket, places, strict=True):
                view[start : start + tensor.nbytes].copy_(_bytes_of(tensor.contiguous()))
            del view  # the memory cannot be unmapped while a tensor refers to it

    def close(self) -> None:
        """Free the memory."""
        os.close(self._file)


def read_shared(path: str, layout: Layout, device: torch.device) -> list[tuple[str, Tensor]]:
    """Return copies of the tensors in shared memory."""
    places, size = _places(layout)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), max(size, 1), access=mmap.ACCESS_COPY) as memory:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        bucket = []
        for (name, dtype, shape), start in zip(layout, places, strict=True):
            tensor = _empty(dtype, shape, device)
            _bytes_of(tensor).copy_(view[start : start + tensor.nbytes])
            bucket.append((name, tensor))
        del view
    return bucket


def _places(layout: Layout) -> tuple[list[int], int]:
    """Return where each tensor starts, and the bytes of all."""
    places = []
    size = 0
    for _, dtype, shape in layout:
        places.append(size)
        nbytes = _empty(dtype, shape, torch.device("meta")).nbytes
        # A view as another dtype must start at a multiple of its size.
        size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, size


class WeightGroup:
    """A process group whose rank 0 broadcasts weights; constructing it waits for all members.

    It is independent of the default group, so the trainer and the engine keep theirs.
    """

    def __init__(self, meeting: Rendezvous, rank: int, device: torch.device, store: TCPStore | None = None) -> None:
        timeout = timedelta(seconds=meeting.timeout_s)
        store = store or TCPStore(meeting.host, meeting.port, meeting.size, is_master=False, timeout=timeout)
        self._store = store
        self._device = device
        if rank:
            store.set(_member(rank), "")
        self._group: ProcessGroup = _new_group(PrefixStore("weights", store), rank, meeting, timeout)

    def send(self, bucket: Bucket) -> None:
        """Broadcast the tensors of a bucket, in order."""
        self._broadcast([tensor.detach().to(self._device).contiguous() for _, tensor in bucket])

    def receive(self, layout: Layout) -> list[tuple[str, Tensor]]:
        """Return the tensors that rank 0 sends."""
        tensors = [_empty(dtype, shape, self._device) for _, dtype, shape in layout]
        self._broadcast(tensors)
        return [(entry[0], tensor) for entry, tensor in zip(layout, tensors, strict=True)]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._group.broadcast(_bytes_of(tensor), 0).wait()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the caller may use or free the tensors on another stream


def _member(rank: int) -> str:
    """Return the store's key by which a member reports that it forms the group."""
    return f"member {rank}"


def are_all_there(store: TCPStore, size: int) -> bool:
    """Return whether all members but rank 0 form their group; then rank 0 does not wait for one that has died."""
    return store.check([_member(rank) for rank in range(1, size)])


def open_store(host: str, size: int, backend: str, timeout_s: float) -> tuple[TCPStore, Rendezvous]:
    """Open the store of a group on a free port of this machine, at ``host`` only; the caller becomes rank 0."""
    port = get_free_port() if envs.read(PORT_RANGE) else 0
    store = listening_store(host, port, size, timedelta(seconds=timeout_s), waits=False)
    return store, Rendezvous(host, store.port, size, backend, timeout_s)


def _new_group(store: PrefixStore, rank: int, meeting: Rendezvous, timeout: timedelta) -> Any:
    if meeting.backend == "nccl":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, meeting.size, options)
    return ProcessGroupGloo(store, rank, meeting.size, timeout)
