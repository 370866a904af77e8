"""Import path of the established verl interface for ``verl.utils.dataset.sft_dataset.MultiTurnSFTDataset``."""

from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset as MultiTurnSFTDataset
