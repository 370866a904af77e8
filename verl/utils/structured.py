"""Build dataclasses from nodes of the configuration tree."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.base_config import ConfigError, Violation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def omega_conf_to_dataclass(config: DictConfig | dict[str, Any] | Any, dataclass_type: type | None = None) -> Any:
    """Build the dataclass of a node: the one that ``_target_`` names, or ``dataclass_type``.

    Returns: for an empty node the default of ``dataclass_type``, or None. A value that is no node comes back unchanged.
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
    """Instantiate the node and raise the dataclass's own error, not Hydra's around it."""
    from hydra.errors import InstantiationException

    try:
        return instantiate(config, _convert_="partial")
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        raise (cause or error) from None


def read_fields(cls: type[T], node: DictConfig) -> T:
    """Build a plain dataclass from a node, which may hold more keys than the dataclass has fields."""
    values: Any = OmegaConf.to_container(node, resolve=True)
    return cls(**{name: values[name] for name in cls.__dataclass_fields__})
