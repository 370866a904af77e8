"""Megatron-Core engines. Importing this prepares Megatron-Core for the CPU where there is no accelerator."""

from verl.utils.megatron import cpu_support

cpu_support.install()

from verl.workers.engine.megatron.engine import (  # noqa: E402
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithScoreHead,
    MegatronEngineWithValueHead,
)

__all__ = ["MegatronEngine", "MegatronEngineWithLMHead", "MegatronEngineWithScoreHead", "MegatronEngineWithValueHead"]
