"""Helpers that depend on no other part of verl. Nothing heavy is imported before it is used."""

from verl.utils.import_utils import lazy_exports

_EXPORTS = {
    "as_torch_index": "verl.utils.groupwise",
    "group_mean_std": "verl.utils.groupwise",
    "hf_processor": "verl.utils.tokenizer",
    "hf_tokenizer": "verl.utils.tokenizer",
    "omega_conf_to_dataclass": "verl.utils.config",
    "validate_config": "verl.utils.config",
}

__all__ = sorted(_EXPORTS)
__getattr__ = lazy_exports(__name__, _EXPORTS)
