"""Helpers under the established names of ``verl.utils.py_functional``, for rewards and workers of users' forks."""

import functools
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from types import FrameType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from verl.utils.failures import settle

P = ParamSpec("P")
T = TypeVar("T")


def _call_with_signal(seconds: float, call: Callable[[], T], message: str) -> T:
    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _call_with_thread(seconds: float, call: Callable[[], T], message: str) -> T:
    outcome: Future[T] = Future()
    threading.Thread(target=settle, args=(outcome, call), daemon=True).start()
    if not wait([outcome], timeout=seconds).done:
        raise TimeoutError(message)
    return outcome.result()


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Raise TimeoutError when the decorated function takes longer than ``seconds``.

    A signal stops the function, but works only on the main thread. Without a signal, the function runs on a daemon
    thread, which continues after the timeout.
    """

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        message = f"{func.__qualname__} took longer than {seconds} s"
        run = _call_with_signal if use_signals else _call_with_thread

        @functools.wraps(func)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            return run(seconds, lambda: func(*args, **kwargs), message)

        return limited

    return decorate


class NestedNamespace(SimpleNamespace):
    """A namespace that turns nested dictionaries into namespaces."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of a namespace must be strings, got {key!r}")
            setattr(self, key, NestedNamespace(value) if isinstance(value, Mapping) else value)


def convert_to_regular_types(obj: Any) -> Any:
    """Turn omegaconf containers into dicts and lists, recursively."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(obj, omegaconf.DictConfig | omegaconf.ListConfig):
        obj = omegaconf.OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple) and not hasattr(obj, "_fields"):
        return type(obj)(convert_to_regular_types(item) for item in obj)
    return obj
