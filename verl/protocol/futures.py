"""The result of a call that is still running."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import ContractError
from verl.protocol.data_proto import DataProto, delayed_copies

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass
class DataProtoFuture:
    """The result of a call that is still running; the next call takes it in place of a batch.

    ``wait_fn`` applies the deadline and the error rules of the worker group that made the call. A future that is sent
    to another process loses ``wait_fn``; that process waits for at most ``timeout_s``. A worker group passes the
    results as dependencies of the next call: ``futures`` then holds values, and nobody waits.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]  # ObjectRef[DataProto], or DataProto once they travel with a call
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    wait_fn: "Callable[[list[ObjectRef[DataProto]]], list[DataProto]] | None" = None
    timeout_s: float | None = None

    @staticmethod
    def concat(data: "list[ObjectRef[DataProto]]") -> "DataProtoFuture":
        """Return a future of the concatenated results."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Return futures of the parts; each collects all results and takes one part."""
        before = self.dispatch_fn

        def part(index: int) -> DataProtoFuture:
            def dispatch(data: DataProto) -> DataProto:
                return (data if before is None else before(data)).chunk(chunks)[index]

            return DataProtoFuture(self.collect_fn, self.futures, dispatch, self.wait_fn, self.timeout_s)

        return [part(index) for index in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the results, collect them, and take this future's part.

        Raises: ValueError, which is also an AssertionError, when a result is not a DataProto.
        """
        import ray

        def results() -> list[DataProto]:
            values: list[DataProto]
            if all(isinstance(value, DataProto) for value in self.futures):
                values = list(self.futures)
            elif self.wait_fn is not None:
                values = self.wait_fn(self.futures)
            else:
                values = ray.get(self.futures, timeout=self.timeout_s)
            for value in values:
                if not isinstance(value, DataProto):
                    raise ContractError(f"a future must hold DataProto, got {type(value).__name__}")
            return values

        with delayed_copies():
            data = self.collect_fn(results())
        return data if self.dispatch_fn is None else self.dispatch_fn(data)

    def __getstate__(self) -> dict[str, "Callable[..., DataProto] | list[ObjectRef[DataProto]] | float | None"]:
        return {**self.__dict__, "wait_fn": None}
