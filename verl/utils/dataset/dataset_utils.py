"""Import path of the established verl interface for ``DatasetPadMode`` and ``SFTTensorCollator``."""

from verl.utils.dataset.sft_dataset import DatasetPadMode as DatasetPadMode
from verl.utils.dataset.sft_dataset import SFTTensorCollator as SFTTensorCollator
