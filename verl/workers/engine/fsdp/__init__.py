"""FSDP engines."""

from verl.workers.engine.fsdp.engine import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithScoreHead,
    FSDPEngineWithValueHead,
)

__all__ = ["FSDPEngine", "FSDPEngineWithLMHead", "FSDPEngineWithScoreHead", "FSDPEngineWithValueHead"]
