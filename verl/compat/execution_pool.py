"""Ray worker pools that run functions under a rate limit, for tools of users' forks.

Our tools need no actor: see ``verl.utils.concurrency``.
"""

import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from verl.errors import UnsupportedInput
from verl.utils.failures import only_warning

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class PoolMode(Enum):
    """The place where a pool runs its functions."""

    ThreadMode = 1
    ProcessMode = 2


@ray.remote(concurrency_groups={"acquire": 1, "release": 10})  # type: ignore[call-overload]
class TokenBucketWorker:
    """Lets at most ``rate_limit`` holders go on at the same time."""

    def __init__(self, rate_limit: int) -> None:
        self.rate_limit = rate_limit
        self._free = threading.Semaphore(rate_limit)
        self._lock = threading.Lock()
        self._count = 0

    @ray.method(concurrency_group="acquire")
    def acquire(self) -> None:
        """Wait until fewer than ``rate_limit`` hold it, and take a place."""
        self._free.acquire()
        self._add(1)

    @ray.method(concurrency_group="release")
    def release(self) -> None:
        """Free the place that ``acquire`` took."""
        self._free.release()
        self._add(-1)

    def get_current_count(self) -> int:
        """Return the number of occupied places."""
        return self._count

    def _add(self, change: int) -> None:
        with self._lock:
            self._count += change


class ExecutionWorker:
    """Runs functions in the threads of its actor, within the limit that all pools of the run share."""

    def __init__(self, enable_global_rate_limit: bool = True, rate_limit: int = 10) -> None:
        self.rate_limit_worker: ActorHandle[TokenBucketWorker] | None = None
        if enable_global_rate_limit:
            options = {"name": "rate-limiter", "get_if_exists": True}
            self.rate_limit_worker = TokenBucketWorker.options(**options).remote(rate_limit)  # type: ignore[attr-defined]

    def ping(self) -> bool:
        """Return true when the actor has started."""
        return True

    def execute(self, fn: Callable[P, T], *fn_args: P.args, **fn_kwargs: P.kwargs) -> T | None:
        """Call a function and return its result; warn and return None if it raises."""
        limit = self.rate_limit_worker
        if limit is not None:
            ray.get(limit.acquire.remote())
        try:
            with only_warning(logger, "a function of the pool has failed"):  # callers take None for no result
                return fn(*fn_args, **fn_kwargs)
            return None
        finally:
            if limit is not None:
                limit.release.remote()


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: int = 10,
    mode: PoolMode = PoolMode.ThreadMode,
) -> Any:
    """Start an actor whose ``execute.remote(fn, *args)`` runs ``num_workers`` functions at once.

    All pools of a run share ``rate_limit``, that of the first one.

    Raises: UnsupportedInput for processes.
    """
    if mode is not PoolMode.ThreadMode:
        raise UnsupportedInput(f"mode={mode}: functions run in threads only: write mode=PoolMode.ThreadMode")
    return ray.remote(ExecutionWorker).options(max_concurrency=num_workers).remote(enable_global_rate_limit, rate_limit)


init_search_execution_pool = init_visual_execution_pool = init_execution_pool  # two tool modules use these names
