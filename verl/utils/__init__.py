"""Helpers that depend on no other part of verl. Nothing heavy is imported before it is used."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "as_torch_index": "verl.utils.groupwise",
    "group_mean_std": "verl.utils.groupwise",
    "hf_processor": "verl.utils.tokenizer",
    "hf_tokenizer": "verl.utils.tokenizer",
    "omega_conf_to_dataclass": "verl.utils.config",
    "validate_config": "verl.utils.config",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
