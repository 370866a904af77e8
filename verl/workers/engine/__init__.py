"""Training engines behind one interface."""

from typing import Any

from verl.utils.import_utils import is_megatron_core_available
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithScoreHead, FSDPEngineWithValueHead
from verl.workers.engine.registry import EngineRegistry

MindspeedEngineWithLMHead = None


def __getattr__(name: str) -> Any:
    """Import Megatron-Core, which takes seconds, at the first use of its engines; None if it is not installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_megatron_core_available():
        return None
    from verl.workers.engine import megatron

    return getattr(megatron, name)


__all__ = [
    "BaseEngine",
    "EngineRegistry",
    "FSDPEngine",
    "FSDPEngineWithLMHead",
    "FSDPEngineWithScoreHead",
    "FSDPEngineWithValueHead",
    "MegatronEngine",
    "MegatronEngineWithLMHead",
    "MegatronEngineWithScoreHead",
    "MegatronEngineWithValueHead",
    "MindspeedEngineWithLMHead",
]
