"""Cut a stream of weights into buckets by bytes, and measure what of it is alive."""

import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor

Bucket = list[tuple[str, Tensor]]


def iter_buckets(stream: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Group (name, tensor) pairs in their order into lists of at most ``max_bytes``; a larger tensor is alone.

    One bucket is alive at a time: the list is emptied when the next one is asked for.

    Raises: ValueError when ``max_bytes`` is not positive.
    """
    if max_bytes <= 0:
        raise ValueError(f"a bucket of weights must hold at least one byte, got {max_bytes}")
    bucket: Bucket = []
    size = 0
    for name, tensor in stream:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket.clear()
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor  # the list holds it; a name here would keep it alive while the next one is made
    if bucket:
        yield bucket
        bucket.clear()


class Meter:
    """Counts the tensors and bytes of a stream that pass, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        self.tensors = self.total_bytes = self.peak_bytes = 0
        self._alive = 0

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass a stream on."""
        for name, tensor in stream:
            self.tensors += 1
            self.total_bytes += tensor.nbytes
            self._alive += tensor.nbytes
            self.peak_bytes = max(self.peak_bytes, self._alive)
            weakref.finalize(tensor, self._gone, tensor.nbytes).atexit = False
            yield name, tensor
            del tensor

    def _gone(self, size: int) -> None:
        self._alive -= size
