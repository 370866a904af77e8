"""Trace trajectories in MLflow or Weave (``actor_rollout_ref.rollout.trace``).

``RolloutTraceConfig.init`` chooses the backend of a process. ``rollout_trace_attr`` opens the trace of one trajectory.
Functions decorated with ``rollout_trace_op`` become its spans, and so do blocks in ``rollout_trace_span``. Without a
backend, each costs one attribute lookup.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, ParamSpec, TypeVar

from verl.utils import envs
from verl.utils.failures import on_failure

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("mlflow", "weave")
DEFAULT_MLFLOW_URI = "sqlite:////tmp/mlruns.db"

Values = dict[str, Any]
"""Attributes of a trace, or arguments of a span, by name."""
Keep = Callable[[Any], None]
"""Takes the result of a span."""

Decode = Callable[[list[int]], str]
"""Turns token ids into text."""

_TEXTS = {"prompt_ids": "prompt_text", "response_ids": "response_text", "token_ids": "text"}
"""Token ids in arguments and results of spans, and where ``token2text`` puts their text."""
_is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)


class RolloutTraceConfig:
    """The trace backend of this process."""

    _backend: "_Mlflow | _Weave | None" = None
    _token2text = False
    _decode: Decode | None = None
    _most_samples: int | None = None
    _samples: ClassVar[dict[tuple[int | None, bool], set[int | str | None]]] = {}
    """The samples that have been traced in the latest step, of training or of validation."""

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        decode: Decode | None = None,
        max_samples_per_step: int | None = None,
    ) -> None:
        """Start to send traces to a project of the backend; None sends none.

        Args: ``decode`` lets ``token2text`` add texts to all spans with token ids. Of each step only the first
        ``max_samples_per_step`` samples of this process are traced, with all their trajectories; None: all.
        Raises: ValueError for an unknown backend, ImportError if its package is not installed.
        """
        if backend not in (None, *BACKENDS):
            raise ValueError(f"rollout.trace.backend={backend!r} must be null or one of {', '.join(BACKENDS)}")
        cls.finish()
        cls._token2text = token2text
        cls._decode = decode
        cls._most_samples = max_samples_per_step
        cls._samples = {}
        if backend is not None:
            cls._backend = (_Mlflow if backend == "mlflow" else _Weave)(project_name, experiment_name)

    @classmethod
    def takes(cls, sample: int | str | None, step: int | None, validate: bool) -> bool:
        """Whether a sample of a step is traced: it already was, or the limit allows one more."""
        if cls._most_samples is None:
            return True
        if (step, validate) not in cls._samples:
            cls._samples = {(step, validate): set()}
        samples = cls._samples[step, validate]
        if len(samples) < cls._most_samples:
            samples.add(sample)
        return sample in samples

    @classmethod
    def get_backend(cls) -> str | None:
        """Return the name of the backend; None if there is none."""
        return None if cls._backend is None else cls._backend.name

    @classmethod
    def get_client(cls) -> Any:
        """Return MLflow's module or Weave's client; None without a backend."""
        return None if cls._backend is None else cls._backend.client

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether traces hold text in addition to token ids."""
        return cls._token2text

    @classmethod
    def reset(cls) -> None:
        """Forget the backend and its options, without flushing: a test starts from here."""
        cls._backend = None
        cls._token2text = False
        cls._decode = None
        cls._most_samples = None
        cls._samples = {}

    @classmethod
    def flush(cls) -> None:
        """Wait until the backend has the traces so far."""
        if cls._backend is not None:
            cls._backend.flush()

    @classmethod
    def finish(cls) -> None:
        """Flush pending traces and stop tracing."""
        backend = cls._backend
        cls._backend = None
        if backend is not None:
            backend.flush()


@contextmanager
def rollout_trace_attr(
    sample_index: int | str | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
) -> Iterator[None]:
    """Collect all spans of the enclosed code in one trace with these attributes."""
    backend = RolloutTraceConfig._backend
    if backend is None or not RolloutTraceConfig.takes(sample_index, step, validate):
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
    """Record calls of a sync or async function as spans of the open trace, with arguments and result."""
    signature = inspect.signature(func)

    def span(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Keep]:
        if RolloutTraceConfig._backend is None or not _is_traced.get():
            return nullcontext(_ignore)
        inputs = dict(signature.bind(*args, **kwargs).arguments)
        inputs.pop("self", None)
        return rollout_trace_span(func.__qualname__, inputs)

    from verl.utils.py_functional import run_in_context  # imports numpy, and the launching process reads BACKENDS only

    return run_in_context(func, span)


@contextmanager
def rollout_trace_span(name: str, inputs: Values) -> Iterator[Keep]:
    """Record the enclosed code as a span of the open trace; yields a function that takes its result."""
    backend = RolloutTraceConfig._backend
    if backend is None or not _is_traced.get():
        yield _ignore
        return
    with backend.span(name, _shown(inputs)) as keep:
        yield lambda result: keep(_shown(result))


def _ignore(result: Any) -> None:
    """Take the result of a span that is not recorded."""


def _shown(value: Any) -> Any:
    """Convert a value for a trace: to plain types, with the texts of tokens, and images as their type only."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _shown({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        shown = {str(name): _shown(part) for name, part in value.items()}
        if RolloutTraceConfig._token2text and RolloutTraceConfig._decode is not None:
            texts = {_TEXTS[name]: shown[name] for name in shown.keys() & _TEXTS.keys() if shown[name] is not None}
            shown |= {name: RolloutTraceConfig._decode(ids) for name, ids in texts.items()}
        return shown
    if isinstance(value, list | tuple):
        return [_shown(part) for part in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    item = getattr(value, "item", None) if getattr(value, "ndim", None) == 0 else None
    return item() if callable(item) else f"<{type(value).__name__}>"


# ---- backends


class _Mlflow:
    """Traces in MLflow: the project is an experiment, attributes are tags.

    MLflow drops traces when its queue is full, so this flushes before the queue can fill up.
    """

    name = "mlflow"
    TASKS_OF_SPAN = 2
    """Most queue entries of one span: the export of the span, and the export of the trace that it ends."""

    def __init__(self, project_name: str, experiment_name: str) -> None:
        import mlflow

        self.client = mlflow
        self.experiment_name = experiment_name
        self._room = envs.integer("MLFLOW_ASYNC_TRACE_LOGGING_MAX_QUEUE_SIZE", 1000)  # MLflow's default
        self._waiting = 0
        mlflow.set_tracking_uri(envs.read("MLFLOW_TRACKING_URI", DEFAULT_MLFLOW_URI))
        mlflow.set_experiment(project_name)

    @contextmanager
    def trace(self, name: str, attributes: Values) -> Iterator[None]:
        """Open a root span and tag its trace."""
        # At the start of a trace: a flush inside of one would wait for spans that have not ended.
        if self._waiting > self._room // 2:
            self.flush()
        self._waiting += self.TASKS_OF_SPAN
        with self.client.start_span(name=name):
            self.client.update_current_trace(tags={key: str(value) for key, value in attributes.items()})
            yield

    @contextmanager
    def span(self, name: str, inputs: Values) -> Iterator[Keep]:
        """Open a child of the current span."""
        self._waiting += self.TASKS_OF_SPAN
        with self.client.start_span(name=name) as span:
            span.set_inputs(inputs)
            yield span.set_outputs

    def flush(self) -> None:
        """Wait for the queue of traces."""
        self.client.flush_trace_async_logging()
        self._waiting = 0


class _Weave:
    """Traces in Weave: every call of a trace carries the trace's attributes, so that searches find each call."""

    name = "weave"

    def __init__(self, project_name: str, experiment_name: str) -> None:
        import weave

        self.experiment_name = experiment_name
        self.client = weave.init(project_name)
        self._attributes: ContextVar[Values | None] = ContextVar("attributes", default=None)

    @contextmanager
    def trace(self, name: str, attributes: Values) -> Iterator[None]:
        """Open the root call."""
        token = self._attributes.set(attributes)
        try:
            with self.span(name, attributes):
                yield
        finally:
            self._attributes.reset(token)

    @contextmanager
    def span(self, name: str, inputs: Values) -> Iterator[Keep]:
        """Open a child of the current call."""
        results: list[Any] = []
        # weave.attributes affects only functions with Weave's own decorator, so attributes are passed here
        call = self.client.create_call(op=name, inputs=inputs, attributes=dict(self._attributes.get() or {}))
        with on_failure(lambda error: self.client.finish_call(call, exception=error)):  # a cancelled call too
            yield results.append
        self.client.finish_call(call, output=results[-1] if results else None)

    def flush(self) -> None:
        """Wait for the queue of calls."""
        self.client.flush()
