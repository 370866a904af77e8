"""Limits for asynchronous work: how much runs at once, and how often something starts."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from verl.utils.sandbox.permits import FilePermits

T = TypeVar("T")

_LOOK_EVERY_S = 0.02


async def in_thread(function: Callable[[], T], name: str = "work") -> T:
    """Call a function in a new thread and return its result.

    Thousands may wait at the same time, and one that never returns keeps neither the process alive nor a place in a
    pool. If the caller is cancelled, the function goes on and nobody learns of its result.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[], None]) -> None:
        if not answer.done():  # false if the caller has been cancelled
            settler()

    def call() -> None:
        try:
            value = function()
            settler = functools.partial(answer.set_result, value)
        except Exception as error:  # the caller raises it, on its event loop
            stops = isinstance(error, StopIteration)  # a future cannot hold StopIteration
            settler = functools.partial(answer.set_exception, RuntimeError(repr(error)) if stops else error)
        except SystemExit as error:  # it would end only the thread; the caller would hang
            settler = functools.partial(answer.set_exception, RuntimeError(f"it has called exit({error.code!r})"))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, settler)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await answer


class ConcurrencyLimit:
    """Lets at most ``count`` tasks of this process run at once.

    Args:
        count: tasks of this process.
        shared_count: tasks of all processes of this machine and user that use ``shared_name``; None for no such limit.
    """

    def __init__(self, count: int, shared_count: int | None = None, shared_name: str = "") -> None:
        self.count = count
        self._permits = None if shared_count is None else FilePermits(shared_name, shared_count)
        # A semaphore belongs to one event loop; a process that starts several one after another has one for each.
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, asyncio.Lock]]
        self._gates = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until the task may run, and hold its place."""
        loop = asyncio.get_running_loop()
        semaphore, first_in_line = self._gates.setdefault(loop, (asyncio.Semaphore(self.count), asyncio.Lock()))
        async with semaphore:
            if self._permits is None:
                yield
                return
            async with first_in_line:  # one task of the process looks for a free permit, the others wait for it
                while (permit := self._permits.try_take()) is None:
                    await asyncio.sleep(_LOOK_EVERY_S)
            try:
                yield
            finally:
                self._permits.give_back(permit)


class RateLimit:
    """Lets ``per_second`` tasks start in a second, at even distances, over all threads and event loops of a process."""

    def __init__(self, per_second: float) -> None:
        self._distance_s = 1.0 / per_second
        self._next = 0.0
        self._lock = threading.Lock()

    async def wait(self) -> None:
        """Wait until the task may start."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            self._next = start + self._distance_s
        if start > now:
            await asyncio.sleep(start - now)
