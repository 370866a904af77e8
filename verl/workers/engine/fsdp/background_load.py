"""Read the weights of a new model in a thread, while the process does other work of its start."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

_running: ContextVar["_Loads | None"] = ContextVar("background_loads", default=None)


@contextmanager
def load_in_background() -> Iterator[None]:
    """Let models that are built in the block get their weights in a thread; leaving the block waits for it.

    Until then only shapes and dtypes of parameters may be read. The work in the block may change the default dtype and
    the random state of the process: loading depends on neither.

    Raises: the error of a load, also where the block has failed, since that may be a consequence.
    """
    with ThreadPoolExecutor(1, "load-weights") as thread:
        loads = _Loads(thread)
        token = _running.set(loads)
        try:
            yield
        finally:
            _running.reset(token)
            loads.wait()


def load(work: Callable[[], None]) -> None:
    """Run the work that fills parameters: in the thread of the block around this call, else now."""
    loads = _running.get()
    if loads is None:
        work()
    else:
        loads.add(work)


def wait_for_weights() -> None:
    """Wait until the parameters have their values. Raises: the error of a load."""
    loads = _running.get()
    if loads is not None:
        loads.wait()


class _Loads:
    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._futures: list[Future[None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self._futures.append(self._thread.submit(work))

    def wait(self) -> None:
        for future in self._futures:
            future.result()
