"""The context in which attention exchanges heads between the ranks that share a sequence."""

from types import TracebackType
from typing import TYPE_CHECKING

from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDPUlyssesShardingManager:
    """Sets the ``sp`` axis of a mesh as the group of sequence parallelism, and the one before it on leaving."""

    def __init__(self, device_mesh: "DeviceMesh | None") -> None:
        self.device_mesh = device_mesh

    def __enter__(self) -> "FSDPUlyssesShardingManager":
        self._previous = get_ulysses_sequence_parallel_group()
        if self.device_mesh is not None:
            set_ulysses_sequence_parallel_group(self.device_mesh["sp"].get_group())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_ulysses_sequence_parallel_group(self._previous)
