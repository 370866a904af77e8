"""vLLM's traces for OpenTelemetry, whose packages are imported when something is traced."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec

from verl.utils import envs
from verl.utils.import_utils import has_module, hidden

if TYPE_CHECKING:
    from opentelemetry.trace import SpanKind, Tracer

P = ParamSpec("P")

_API = "opentelemetry.trace"
_PACKAGES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
)


def import_traces_on_use() -> None:
    """Import ``vllm.tracing`` without OpenTelemetry, and import that when something is traced.

    Versions: 0.32. When its modules are imported vLLM decides which of their functions can be traced, and imports
    OpenTelemetry for that, 14 MB, although only a run with ``otlp_traces_endpoint`` uses it. Call this after ``import
    vllm`` and before its other parts are imported. Nothing changes if a package is missing, or one of them or
    ``vllm.tracing`` has been imported. Remove when vLLM imports OpenTelemetry at first use.
    """
    folder = Path(importlib.import_module("vllm").__path__[0], "tracing")
    is_imported = _is_in_use() or "vllm.tracing" in sys.modules
    if is_imported or not Path(folder, "otel.py").exists() or not all(map(has_module, _PACKAGES)):
        return
    with hidden([_API]):
        tracing = importlib.import_module("vllm.tracing")
    load = functools.cache(functools.partial(_load, tracing))
    # The failed import was intended, so its traceback is dropped. If the real import fails later, ``init_otel_tracer``
    # reports the reason.
    vars(tracing).update(SpanKind=_SpanKind(load), otel_import_error_traceback=None)
    tracing._REGISTERED_TRACING_BACKENDS["otel"] = (
        lambda: True,
        lambda *args, **kwargs: load().init_otel_tracer(*args, **kwargs),
        functools.partial(_init_worker_tracer, load),
        functools.partial(_instrument, load),
        functools.partial(_instrument_manually, load),
    )


def _load(tracing: ModuleType) -> ModuleType:
    """Execute vLLM's module again, so that names imported from it find OpenTelemetry."""
    return importlib.reload(sys.modules[f"{tracing.__name__}.otel"])


def _is_in_use() -> bool:
    return _API in sys.modules


class _SpanKind:
    """The kinds of spans, looked up in OpenTelemetry at the first use."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> "SpanKind":
        return getattr(self._load().SpanKind, name)


def _init_worker_tracer(load: Callable[[], ModuleType], *args: str, **kwargs: str) -> "Tracer | None":
    if envs.read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):  # ``init_otel_tracer`` sets it for the processes of an engine
        return load().init_otel_worker_tracer(*args, **kwargs)
    return None


def _instrument(
    load: Callable[[], ModuleType], func: Callable[P, Any], **options: str | bool | dict[str, str] | None
) -> Callable[P, Any]:
    @functools.cache
    def traced() -> Callable[P, Any]:
        return load().instrument_otel(func=func, **options)

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return (traced() if _is_in_use() else func)(*args, **kwargs)

    @functools.wraps(func)
    async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await (traced() if _is_in_use() else func)(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(func) else call


def _instrument_manually(load: Callable[[], ModuleType], *args: Any, **kwargs: Any) -> None:
    if _is_in_use():
        load().manual_instrument_otel(*args, **kwargs)
