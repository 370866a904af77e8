"""The configuration tree, and the dataclasses that its nodes name."""

from verl.algos.config import AlgoConfig, FilterGroupsConfig, KLControlConfig
from verl.workers.config import BaseModelConfig, CheckpointConfig

__all__ = ["AlgoConfig", "BaseModelConfig", "CheckpointConfig", "FilterGroupsConfig", "KLControlConfig"]
