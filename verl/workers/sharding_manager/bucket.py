"""Collect a stream of weights into buckets by bytes, and measure what of it is alive."""

import weakref
from collections.abc import Callable

from torch import Tensor

Bucket = list[tuple[str, Tensor]]


SMALLEST_SHARE = 8
"""What the receiver holds back makes a bucket smaller, down to this part of it: each costs a call."""


class Bucketer:
    """Hands (name, tensor) pairs on in their order, in lists of at most ``max_bytes``; a larger tensor is alone.

    The list is emptied when ``load`` returns. With the bytes that the receiver holds back until the rest of a layer
    comes, ``pending``, a list stays below ``max_bytes`` too, where that is possible.

    Raises: ValueError when ``max_bytes`` is not positive.
    """

    def __init__(self, max_bytes: int, load: Callable[[Bucket], None], pending: Callable[[], int] = lambda: 0) -> None:
        if max_bytes <= 0:
            raise ValueError(f"a bucket of weights must hold at least one byte, got {max_bytes}")
        self._max_bytes, self._load, self._pending = max_bytes, load, pending
        self._bucket: Bucket = []
        self._size = 0

    def make_room(self, nbytes: int) -> None:
        """Hand on what a tensor of ``nbytes`` does not fit beside; called before that tensor is made."""
        pending = self._pending()
        room = self._max_bytes if pending >= self._max_bytes else self._max_bytes - pending
        if self._size + nbytes > max(room, self._max_bytes // SMALLEST_SHARE):
            self.flush()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor."""
        self.make_room(tensor.nbytes)
        self._bucket.append((name, tensor))
        self._size += tensor.nbytes

    def flush(self) -> None:
        """Hand on what is there."""
        if self._bucket:
            self._load(self._bucket)
            self._bucket.clear()
        self._size = 0


class Meter:
    """Counts the tensors and bytes of a stream that pass, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        self.tensors = self.total_bytes = self.peak_bytes = 0
        self._alive = 0

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor until nothing refers to it."""
        self.tensors += 1
        self.total_bytes += tensor.nbytes
        self._alive += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self._alive)
        weakref.finalize(tensor, self._gone, tensor.nbytes).atexit = False

    def _gone(self, size: int) -> None:
        self._alive -= size
