"""Data sets: prompts for RL, conversations for supervised training, and pairs for reward models."""

from importlib import import_module

_EXPORTS = {
    "RLHFDataset": "verl.utils.dataset.rl_dataset",
    "RMDataset": "verl.utils.dataset.rm_dataset",
    "SFTDataset": "verl.utils.dataset.sft_dataset",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> type:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
