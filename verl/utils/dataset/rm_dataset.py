"""Import path of the established verl interface for ``verl.utils.dataset.sft_dataset.RMDataset``."""

from verl.utils.dataset.sft_dataset import RMDataset as RMDataset
