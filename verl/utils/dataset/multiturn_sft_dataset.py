"""Established path of ``verl.utils.dataset.sft_dataset.MultiTurnSFTDataset``."""

from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset as MultiTurnSFTDataset
