"""From the configuration tree to dataclasses."""

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.base_config import ConfigError, UnsupportedConfigError, Violation

__all__ = [
    "ConfigError",
    "UnsupportedConfigError",
    "Violation",
    "omega_conf_to_dataclass",
    "update_dict_with_config",
    "validate_config",
]


def omega_conf_to_dataclass(config: DictConfig | dict[str, Any] | Any, dataclass_type: type | None = None) -> Any:
    """Build the dataclass of a node: the one that its ``_target_`` names, or ``dataclass_type``.

    Returns: the default of ``dataclass_type``, or None, for an empty node; what is no node comes back as it is.
    Raises: ConfigError when a value has the wrong type or breaks a rule, ValueError when no dataclass is named.
    """
    if not config and (config is None or isinstance(config, Mapping)):
        return dataclass_type() if dataclass_type is not None else None
    if not isinstance(config, DictConfig | ListConfig | dict | list):
        return config
    if dataclass_type is None:
        if "_target_" not in config:
            raise ConfigError([Violation("_target_", None, "is missing: name the dataclass of this node")])
        from hydra.utils import instantiate

        return _unwrapped(instantiate, config)
    if not is_dataclass(dataclass_type):
        raise ValueError(f"dataclass_type={dataclass_type!r} must be a dataclass")
    structured = OmegaConf.structured(dataclass_type)
    merged = OmegaConf.merge(structured, OmegaConf.create(config) if isinstance(config, dict) else config)
    return OmegaConf.to_object(merged)


def _unwrapped(instantiate: Any, config: Any) -> Any:
    """Instantiate, and raise what the dataclass raised rather than Hydra's wrapping of it."""
    from hydra.errors import InstantiationException

    try:
        return instantiate(config, _convert_="partial")
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        raise (cause or error) from None


def update_dict_with_config(dictionary: MutableMapping[str, Any], config: Any) -> None:
    """Replace each value of ``dictionary`` by the attribute of ``config`` with the same name, where there is one."""
    for key in dictionary:
        if hasattr(config, key):
            dictionary[key] = getattr(config, key)


def validate_config(
    config: DictConfig, use_reference_policy: bool, use_critic: bool, recipe_nodes: Collection[str] = ()
) -> None:
    """Check the whole ``ppo_trainer`` tree before anything starts; ``recipe_nodes`` are read by the recipe that runs.

    Raises: ConfigError listing everything that is wrong.
    """
    from verl.trainer.config.validation import validate_config as validate

    validate(config, use_reference_policy, use_critic, recipe_nodes)
