"""Training engines behind one interface."""

from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithScoreHead,
    FSDPEngineWithValueHead,
)

MegatronEngine = MegatronEngineWithLMHead = MindspeedEngineWithLMHead = None

__all__ = [
    "BaseEngine",
    "EngineRegistry",
    "FSDPEngine",
    "FSDPEngineWithLMHead",
    "FSDPEngineWithScoreHead",
    "FSDPEngineWithValueHead",
    "MegatronEngine",
    "MegatronEngineWithLMHead",
    "MindspeedEngineWithLMHead",
]
