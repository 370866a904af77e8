"""Stream the trainer's weights into the rollout of the same process, verified, on all ranks or on none."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import WeightSyncError
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.faults import fault_point
from verl.utils.memory_utils import return_freed_host_memory_if_short

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine
    from verl.workers.rollout.base import BaseRollout


Bucket = list[tuple[str, Tensor]]

_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which an engine may hold a tensor; None is unknown."""

SMALLEST_SHARE = 8
"""The smallest bucket is the limit divided by this number."""


class Bucketer:
    """Pass (name, tensor) pairs on in order, in lists of at most ``max_bytes``; a larger tensor is alone in its list.

    The receiver may keep tensors until the rest of their layer arrives; ``pending`` returns their bytes. The bucket
    shrinks by that amount, so that both together stay below ``max_bytes``. It does not shrink below the limit divided
    by ``SMALLEST_SHARE``, because each bucket costs a call. The list is emptied after ``load``.

    Raises: ValueError when ``max_bytes`` is not positive.
    """

    def __init__(self, max_bytes: int, load: Callable[[Bucket], None], pending: Callable[[], int] = lambda: 0) -> None:
        if max_bytes <= 0:
            raise ValueError(f"a bucket of weights must hold at least one byte, got {max_bytes}")
        self._max_bytes = max_bytes
        self._load = load
        self._pending = pending
        self._bucket: Bucket = []
        self._size = 0

    def make_room(self, nbytes: int) -> None:
        """Flush the bucket if a tensor of ``nbytes`` does not fit into it; called before that tensor is allocated."""
        pending = self._pending()
        room = self._max_bytes if pending >= self._max_bytes else self._max_bytes - pending
        # The tensor does not exist yet: the bucket goes first, so that its memory can hold the tensor.
        if self._size + nbytes > max(room, self._max_bytes // SMALLEST_SHARE):
            self.flush()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor."""
        self.make_room(tensor.nbytes)
        self._bucket.append((name, tensor))
        self._size += tensor.nbytes

    def flush(self) -> None:
        """Pass the bucket on."""
        if self._bucket:
            self._load(self._bucket)
            self._bucket.clear()
        self._size = 0


class Meter:
    """Count the tensors and bytes of a stream, and the peak of its live bytes."""

    def __init__(self) -> None:
        self.tensors = 0
        self.total_bytes = 0
        self.peak_bytes = 0
        self._alive = 0

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor as live until nothing refers to it."""
        self.tensors += 1
        self.total_bytes += tensor.nbytes
        self._alive += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self._alive)
        # The receiver may keep a tensor for a while, so only the end of its last reference tells when its bytes are
        # free.
        weakref.finalize(tensor, self._gone, tensor.nbytes).atexit = False

    def _gone(self, size: int) -> None:
        self._alive -= size


class WeightSync:
    """One update of a rollout's weights; collective over all ranks of the trainer.

    Abort: making a tensor may be collective, so a rank whose load fails keeps draining the stream; a rank that stopped
    would block the others forever. After the stream and after the check, the ranks exchange failures. If any rank
    failed, all of them abort and raise, so the version goes up on all ranks or on none.

    Checksum: the sums of the sent tensors are computed bucket by bucket, before the load, and compared with sums that
    are read back from the engine after the load. Sender and receiver may share memory, so the sent tensor itself proves
    nothing about the engine.
    """

    def __init__(self, engine: "BaseEngine", rollout: "BaseRollout", bucket_bytes: int, step: int | None) -> None:
        self._engine = engine
        self._rollout = rollout
        self._step = step
        self._bucketer = Bucketer(bucket_bytes, self._take, lambda: rollout.pending_bytes)
        self._meter = Meter()
        self._num_buckets = 0
        self._expected: dict[str, Tensor] = {}
        self._unverified = 0
        self._failure: Exception | None = None

    def run(self) -> dict[str, float]:
        """Bring the rollout to the engine's version and return the metrics of the sync.

        Raises: WeightSyncError naming rank and tensor.
        """
        started = time.perf_counter()
        version = self._engine.weights_version
        with self._failure_kept():
            self._rollout.begin_update()
        # Even after a failed ``begin_update`` this rank makes all its tensors, which the other ranks need.
        self._stream()
        self._agree()
        with self._failure_kept():
            self._rollout.finish_update(version)
            self._verify()
        self._agree()
        if self._num_buckets > 1:
            self._return_freed()
        return {
            "bytes": float(self._meter.total_bytes),
            "tensors": float(self._meter.tensors),
            "buckets": float(self._num_buckets),
            "peak_bytes": float(self._meter.peak_bytes),
            "checksum_ok": 1.0,
            "unverified_tensors": float(self._unverified + self._rollout.unverified),
            "version": float(version),
            "seconds": time.perf_counter() - started,
        }

    def _stream(self) -> None:
        """Drain the engine's weights into buckets; a bucket is flushed before the next tensor is allocated."""
        for name, tensor in self._engine.sent_weights(self._agreed_dtypes, self._make_room):
            self._meter.watch(tensor)
            self._bucketer.add(name, tensor)
            del tensor  # otherwise it stays alive while the next one is allocated
        self._bucketer.flush()

    def _agreed_dtypes(self, names: Sequence[Sequence[str]]) -> list[torch.dtype | None]:
        """Return the dtype in which all ranks' engines hold a parameter's tensors; None if they differ; collective."""
        dtypes: list[set[torch.dtype | None]] = [set() for _ in names]
        with self._failure_kept():
            dtypes = [{self._rollout.weight_dtype(name) for name in each} for each in names]
        codes = torch.tensor([_DTYPES.index(each.pop()) if len(each) == 1 else 0 for each in dtypes])
        # One reduction gives maximum and minimum: a dtype holds where both agree, on all ranks.
        bounds = torch.stack([codes, -codes])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX)
        return [_DTYPES[high] if high == -low else None for high, low in bounds.T.tolist()]

    def _make_room(self, nbytes: int) -> None:
        """Flush the bucket if a tensor does not fit, so that its memory is free before the tensor is allocated."""
        handed_on = self._num_buckets
        self._bucketer.make_room(nbytes)
        if self._num_buckets > handed_on:
            self._return_freed()

    @staticmethod
    def _return_freed() -> None:
        if get_device_name() == "cpu":  # on accelerators the stream is not in host memory
            return_freed_host_memory_if_short()

    def _take(self, bucket: Bucket) -> None:
        self._num_buckets += 1
        if self._failure is None:
            with self._failure_kept():
                self._load(bucket)
        if self._num_buckets == 1:
            fault_point("weight_sync", rank=envs.integer("RANK", 0), step=self._step)

    def _load(self, bucket: Bucket) -> None:
        for pair in bucket:
            due = self._rollout.source_checksum(*pair)
            if due is None:
                self._unverified += 1
            else:
                # The sum is taken before the load, which may hand the memory of the tensor to the engine or change it.
                self._expected[due[0]] = due[1]
        # Else the last tensor would outlive the bucket that ``load`` frees.
        del pair
        self._rollout.load(bucket)

    def _verify(self) -> None:
        """Compare the checksums of the sent tensors with those of the engine."""
        if not self._expected:
            return
        expected = dict(zip(self._expected, torch.stack(list(self._expected.values())).tolist(), strict=True))
        found = self._rollout.weights_checksum()
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        if wrong:
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise WeightSyncError(
                f"{len(wrong)} of {len(expected)} tensors in the rollout engine differ from what was sent: {shown}"
            )

    @contextmanager
    def _failure_kept(self) -> Iterator[None]:
        """Keep any error of this rank until the ranks exchange failures; see "Abort" above."""
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks wait for this one
            self._failure = error

    def _agree(self) -> None:
        """Raise on all ranks, with the messages of all ranks, if any rank has failed."""
        failure = self._failure
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed or torch.distributed.get_world_size() == 1:
            if failure is not None:
                self._rollout.abort_update()
                raise WeightSyncError(f"weight sync failed: {failure}") from failure
            return
        # Every rank comes here, also those that succeeded. The usual case costs one number; messages are exchanged only
        # when some rank has failed.
        failed = torch.tensor([int(failure is not None)])
        torch.distributed.all_reduce(failed)
        if not failed.item():
            return
        messages: list[str | None] = [None] * torch.distributed.get_world_size()
        mine = None if failure is None else f"{type(failure).__name__}: {failure}"
        torch.distributed.all_gather_object(messages, mine)
        self._rollout.abort_update()
        told = "; ".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None)
        raise WeightSyncError(f"weight sync failed: {told}") from failure
