"""The stateful loader of torchdata, without its noise."""

import warnings
from typing import Any

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def stateful_loader(dataset: Dataset, **options: Any) -> StatefulDataLoader:
    """Return a loader whose position can be saved and restored; ``options`` are those of ``StatefulDataLoader``."""
    with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(dataset=dataset, **options)
