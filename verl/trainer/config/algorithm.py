"""Import path of the established verl interface for the configuration of ``verl.algos``."""

from verl.algos.config import AlgoConfig, FilterGroupsConfig, KLControlConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig"]
