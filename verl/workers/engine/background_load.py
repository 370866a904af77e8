"""Read the weights of a new model in a thread, while the process does other work of its start."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import psutil
import torch
from torch import Tensor

from verl.utils import envs

Values = Iterable[tuple[Tensor, Tensor]]
"""Pairs of memory on an accelerator and the value that belongs there."""

_running: ContextVar["_Loads | None"] = ContextVar("background_loads", default=None)


@contextmanager
def load_in_background() -> Iterator[None]:
    """Load the weights of models that are built in the block in a thread; wait for it at the end of the block.

    Until then only shapes and dtypes of parameters may be read, and nothing may move or replace their memory. The work
    in the block may change the default dtype and the random state of the process: loading depends on neither.

    Raises: the error of a load, also if the block has failed, since the block's failure may be a consequence.
    """
    with ThreadPoolExecutor(1, "load-weights") as thread:
        loads = _Loads(thread)
        token = _running.set(loads)
        try:
            yield
        finally:
            _running.reset(token)
            loads.wait()
        # Not after an error in the block: nobody then uses the models whose memory this would fill.
        loads.finish()


def fill(memory: Iterable[Tensor], read: Callable[[], Values], at_once: bool = False) -> None:
    """Let ``read`` fill the memory of parameters: in the thread of the enclosing block, or now without a block.

    Filling also happens now with ``at_once``, or if the host has no room for values that wait for an accelerator.

    Args: ``read`` hands each value to ``place``, and yields what that yields.
    """
    loads = _running.get()
    if at_once or loads is None or not loads.has_room_for(memory):
        _store(read())
    else:
        loads.add(read)


def place(value: Tensor, memory: Tensor) -> Values:
    """Copy a value into memory of the host; yield memory of an accelerator with its value, for ``fill``.

    The process's own thread copies the value to the accelerator: a copy from another thread could break a CUDA graph
    that an engine captures at the same time. Since the memory is there already, an engine that measures what is free
    sees the whole model.
    """
    if memory.device.type == "cpu":
        with torch.no_grad():
            memory.copy_(value)
    else:
        yield memory, value


def when_filled(work: Callable[[], None]) -> None:
    """Run work that needs or moves the weights: after the load of the enclosing block, or now without a block."""
    loads = _running.get()
    if loads is None:
        work()
    else:
        loads.dependents.append(work)


def wait_for_weights() -> None:
    """Wait until the parameters have their values. Raises: the error of a load."""
    loads = _running.get()
    if loads is not None:
        loads.finish()


@torch.no_grad()
def _store(values: Values) -> None:
    for memory, value in values:
        memory.copy_(value)


class _Loads:
    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.dependents: list[Callable[[], None]] = []
        self._thread = thread
        self._futures: list[Future[list[tuple[Tensor, Tensor]]]] = []
        workers = envs.integer("RAY_LOCAL_WORLD_SIZE", 1)
        # Half of the free memory, shared by the workers of the machine, which load at the same time.
        self._room = psutil.virtual_memory().available // 2 // workers

    def has_room_for(self, memory: Iterable[Tensor]) -> bool:
        """Return whether values for an accelerator may wait in host memory; if so, reserve the room."""
        needed = sum(each.nbytes for each in memory if each.device.type != "cpu")
        if needed > self._room:
            return False
        self._room -= needed
        return True

    def add(self, read: Callable[[], Values]) -> None:
        self._futures.append(self._thread.submit(lambda: list(read())))

    def wait(self) -> None:
        for future in self._futures:
            future.result()

    def finish(self) -> None:
        self.wait()
        while self._futures:
            _store(self._futures.pop(0).result())
        dependents = self.dependents
        self.dependents = []
        for work in dependents:
            work()
