"""Collect a stream of weights into buckets by bytes, and measure its live bytes."""

import weakref
from collections.abc import Callable

from torch import Tensor

Bucket = list[tuple[str, Tensor]]

SMALLEST_SHARE = 8
"""Smallest bucket, as the limit divided by this number."""


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
        weakref.finalize(tensor, self._gone, tensor.nbytes).atexit = False

    def _gone(self, size: int) -> None:
        self._alive -= size
