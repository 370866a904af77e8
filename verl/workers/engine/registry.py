"""The training engines by model type, backend and device, and the packages that define verl's engines."""

import importlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from verl.errors import WrongSetting
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine

PACKAGES = {
    "fsdp": "verl.workers.engine.fsdp",
    "fsdp2": "verl.workers.engine.fsdp",
    "megatron": "verl.workers.engine.megatron",
}
"""Backend -> the package that registers its engines, which is imported when an engine is asked for."""


class EngineRegistry:
    """Engines by model type, backend and device."""

    _engines: dict[tuple[str, str, str], type[BaseEngine]] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: str | Sequence[str], device: str | Sequence[str] = "cuda"
    ) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """Enter the decorated class under every combination of the given names."""
        backends = [backend] if isinstance(backend, str) else backend
        devices = [device] if isinstance(device, str) else device

        def enter(engine: type[BaseEngine]) -> type[BaseEngine]:
            for name, kind in product(backends, devices):
                cls._engines[model_type, name, kind] = engine
            return engine

        return enter

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """Return the engine for the current device.

        Raises: ValueError, which is also an AssertionError, when there is none.
        """
        if backend in PACKAGES:
            importlib.import_module(PACKAGES[backend])
        key = (model_type, backend, get_device_name())
        if key not in cls._engines:
            raise WrongSetting(f"no engine for (model_type, backend, device) {key}; known: {sorted(cls._engines)}")
        return cls._engines[key]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Construct the engine for the current device."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)
