"""How the rows of supervised data become a batch."""

from enum import StrEnum
from typing import Any

import torch
from torch.utils.data import default_collate


class DatasetPadMode(StrEnum):
    """Where rows are padded."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    NO_PADDING = "no_padding"


LISTED = ("multi_modal_inputs",)
"""Keys of items that hold an object for each row."""


class SFTTensorCollator:
    """Stacks rows of one length, or puts rows of any length into jagged nested tensors."""

    def __init__(self, pad_mode: DatasetPadMode | str = DatasetPadMode.LEFT_RIGHT) -> None:
        try:
            self.pad_mode = DatasetPadMode(pad_mode)
        except ValueError:
            raise ValueError(
                f"data.pad_mode must be one of {[mode.value for mode in DatasetPadMode]}, got {pad_mode!r}"
            ) from None

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one tensor per key, and lists of what is no tensor or, unpadded, has several axes."""
        if self.pad_mode is not DatasetPadMode.NO_PADDING:
            stacked = [{key: value for key, value in row.items() if key not in LISTED} for row in batch]
            return default_collate(stacked) | {key: [row[key] for row in batch] for key in LISTED if key in batch[0]}
        return {
            key: torch.nested.as_nested_tensor([row[key] for row in batch], layout=torch.jagged)
            if isinstance(value, torch.Tensor) and value.dim() == 1
            else [row[key] for row in batch]
            for key, value in batch[0].items()
        }
