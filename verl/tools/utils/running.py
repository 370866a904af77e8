"""The calls that run, by instance, so that they can be cancelled."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RunningCalls:
    """The tasks in which a tool runs calls."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}

    @contextmanager
    def call(self, instance_id: str) -> Iterator[None]:
        """Note that the current task runs a call of an instance."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(instance_id, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(instance_id, None)

    def cancel(self, instance_id: str) -> None:
        """Cancel the calls of an instance; nothing happens if it has none."""
        for task in list(self._tasks.get(instance_id, ())):
            task.cancel()
