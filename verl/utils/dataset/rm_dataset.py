"""Established path of ``verl.utils.dataset.sft_dataset.RMDataset``."""

from verl.utils.dataset.sft_dataset import RMDataset as RMDataset
