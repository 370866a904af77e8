"""Base class of the contexts that switch a process between training and another use of its devices."""

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.protocol import DataProto


class BaseShardingManager:
    """A context for generation, or for a parallel layout; the base class does nothing."""

    def __enter__(self) -> "BaseShardingManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def preprocess_data(self, data: "DataProto") -> "DataProto":
        """Lay a batch out for use inside the context."""
        return data

    def postprocess_data(self, data: "DataProto") -> "DataProto":
        """Undo ``preprocess_data`` on a result."""
        return data
