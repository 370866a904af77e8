"""Data sets: prompts for RL, conversations for supervised training, and pairs for reward models."""

from verl.utils.import_utils import lazy_exports

_EXPORTS = {
    "RLHFDataset": "verl.utils.dataset.rl_dataset",
    "RMDataset": "verl.utils.dataset.sft_dataset",
    "SFTDataset": "verl.utils.dataset.sft_dataset",
}

__all__ = sorted(_EXPORTS)
__getattr__ = lazy_exports(__name__, _EXPORTS)
