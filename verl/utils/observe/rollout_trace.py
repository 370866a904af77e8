"""Traces of trajectories in MLflow or Weave (``actor_rollout_ref.rollout.trace``).

``RolloutTraceConfig.init`` chooses the backend of a process; ``rollout_trace_attr`` opens the trace of one trajectory,
and the functions that ``rollout_trace_op`` decorates become its spans. Without a backend they cost a look-up.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from verl.utils import envs

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("mlflow", "weave")
DEFAULT_MLFLOW_URI = "sqlite:////tmp/mlruns.db"

_is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)


class RolloutTraceConfig:
    """Where the traces of this process go."""

    _backend: "_Backend | None" = None
    _token2text = False

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, token2text: bool = False) -> None:
        """Send traces to a project of the backend from now on; None sends none.

        Raises: ValueError for another backend, ImportError where its package is not installed.
        """
        if backend not in (None, *BACKENDS):
            raise ValueError(f"rollout.trace.backend={backend!r} must be null or one of {', '.join(BACKENDS)}")
        cls.finish()
        cls._token2text = token2text
        if backend is not None:
            cls._backend = {"mlflow": _Mlflow, "weave": _Weave}[backend](project_name, experiment_name)

    @classmethod
    def get_backend(cls) -> str | None:
        """Return the name of the backend, None without one."""
        return None if cls._backend is None else cls._backend.name

    @classmethod
    def get_client(cls) -> Any:
        """Return the backend's own client: the module of MLflow, the client of Weave."""
        return None if cls._backend is None else cls._backend.client

    @classmethod
    def enable_token2text(cls) -> bool:
        """Whether traces hold text beside token ids."""
        return cls._token2text

    @classmethod
    def finish(cls) -> None:
        """Send what is still on its way, and trace no more."""
        backend, cls._backend = cls._backend, None
        if backend is not None:
            backend.flush()


@contextmanager
def rollout_trace_attr(
    sample_index: Any = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
) -> Iterator[None]:
    """Make what is called inside one trace, found by these attributes."""
    backend = RolloutTraceConfig._backend
    if backend is None:
        yield
        return
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes = {key: value for key, value in given.items() if value is not None}
    attributes |= {"validate": validate, "experiment_name": backend.experiment_name}
    token = _is_traced.set(True)
    try:
        with backend.trace(name, attributes):
            yield
    finally:
        _is_traced.reset(token)


def rollout_trace_op(func: Callable[P, T]) -> Callable[P, T]:
    """Make calls of a function, sync or async, spans of the trace that is open, with its arguments and its result."""
    signature = inspect.signature(func)

    def span(args: Any, kwargs: Any) -> "AbstractContextManager[Callable[[Any], None]]":
        backend = RolloutTraceConfig._backend
        if backend is None or not _is_traced.get():
            return nullcontext(lambda result: None)
        inputs = dict(signature.bind(*args, **kwargs).arguments)
        inputs.pop("self", None)
        return backend.span(func.__qualname__, inputs)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(args, kwargs) as keep:
            result = func(*args, **kwargs)
            keep(result)
        return result

    @functools.wraps(func)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        with span(args, kwargs) as keep:
            result = await func(*args, **kwargs)  # type: ignore[misc]  # a coroutine function
            keep(result)
        return result

    return cast(Callable[P, T], call_async if inspect.iscoroutinefunction(func) else call)


# ---- backends


class _Backend(Protocol):
    name: str
    client: Any
    experiment_name: str

    def trace(self, name: str, attributes: dict[str, Any]) -> AbstractContextManager[None]:
        """Open a trace."""

    def span(self, name: str, inputs: dict[str, Any]) -> AbstractContextManager[Callable[[Any], None]]:
        """Open a span; what it yields takes the result."""

    def flush(self) -> None:
        """Wait until everything has been sent."""


class _Mlflow:
    """The project is an experiment of MLflow; attributes are tags of a trace.

    MLflow sends from a queue and drops what does not fit, so that this waits for it before the queue can be full.
    """

    name = "mlflow"
    TASKS_OF_SPAN = 2
    """Entries of the queue that a span may make: its own export, and that of the trace which it ends."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        import mlflow

        self.client, self.experiment_name = mlflow, experiment_name
        self._room = envs.integer("MLFLOW_ASYNC_TRACE_LOGGING_MAX_QUEUE_SIZE", 1000)  # the default of MLflow
        self._waiting = 0
        mlflow.set_tracking_uri(envs.read("MLFLOW_TRACKING_URI", DEFAULT_MLFLOW_URI))
        mlflow.set_experiment(project_name)

    @contextmanager
    def trace(self, name: str, attributes: dict[str, Any]) -> Iterator[None]:
        """Open a root span and tag its trace."""
        if self._waiting > self._room // 2:
            self.flush()
        self._waiting += self.TASKS_OF_SPAN
        with self.client.start_span(name=name):
            self.client.update_current_trace(tags={key: str(value) for key, value in attributes.items()})
            yield

    @contextmanager
    def span(self, name: str, inputs: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
        """Open a span below the one that is open."""
        self._waiting += self.TASKS_OF_SPAN
        with self.client.start_span(name=name) as span:
            span.set_inputs(inputs)
            yield span.set_outputs

    def flush(self) -> None:
        """Wait for the queue of traces."""
        self.client.flush_trace_async_logging()
        self._waiting = 0


class _Weave:
    """Attributes of a trace are those of each of its calls, so that any of them is found by them."""

    name = "weave"

    def __init__(self, project_name: str, experiment_name: str) -> None:
        import weave

        self.experiment_name = experiment_name
        self.client = weave.init(project_name)
        self._attributes: ContextVar[dict[str, Any] | None] = ContextVar("attributes", default=None)

    @contextmanager
    def trace(self, name: str, attributes: dict[str, Any]) -> Iterator[None]:
        """Open a call that holds the others."""
        token = self._attributes.set(attributes)
        try:
            with self.span(name, attributes):
                yield
        finally:
            self._attributes.reset(token)

    @contextmanager
    def span(self, name: str, inputs: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
        """Open a call below the one that is open."""
        results: list[Any] = []
        # given here: only functions that are decorated as Weave's own take what weave.attributes has set
        call = self.client.create_call(op=name, inputs=inputs, attributes=dict(self._attributes.get() or {}))
        try:
            yield results.append
        except BaseException as error:
            self.client.finish_call(call, exception=error)
            raise
        self.client.finish_call(call, output=results[-1] if results else None)

    def flush(self) -> None:
        """Wait for the queue of calls."""
        self.client.flush()
