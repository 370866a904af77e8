"""Megatron-Core engines. Importing this prepares Megatron-Core for the CPU where there is no accelerator."""

import warnings

from verl.utils.device import get_device_name
from verl.utils.import_utils import hidden

if get_device_name() == "cpu":  # on others the user should know what is not installed
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

with hidden(["wandb"]):  # Megatron-Core imports it, and it makes folders that a killed process leaves
    from verl.utils.megatron import cpu_support

    cpu_support.install()

    from verl.workers.engine.megatron.engine import (
        MegatronEngine,
        MegatronEngineWithLMHead,
        MegatronEngineWithScoreHead,
        MegatronEngineWithValueHead,
    )

__all__ = ["MegatronEngine", "MegatronEngineWithLMHead", "MegatronEngineWithScoreHead", "MegatronEngineWithValueHead"]
