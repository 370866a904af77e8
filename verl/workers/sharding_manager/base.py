"""The HybridEngine: devices and weights that training and generation share, and who has them when."""

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.protocol import DataProto


class BaseShardingManager:
    """A context in which the other side (generation, or a parallel layout) may be used; does nothing by itself."""

    def __enter__(self) -> "BaseShardingManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def preprocess_data(self, data: "DataProto") -> "DataProto":
        """Lay a batch out for the inside of the context."""
        return data

    def postprocess_data(self, data: "DataProto") -> "DataProto":
        """Undo ``preprocess_data`` on a result."""
        return data
