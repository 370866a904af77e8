"""Collation of supervised rows into batches."""

from enum import StrEnum

import torch
from torch.utils.data import default_collate

from verl.utils.dataset.files import Row


class DatasetPadMode(StrEnum):
    """How rows are padded."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    NO_PADDING = "no_padding"


LISTED = ("multi_modal_inputs",)
"""Keys that hold one object per row; a batch holds them as a list."""


class SFTTensorCollator:
    """Stack rows of equal length, or put rows of any length into jagged nested tensors."""

    def __init__(self, pad_mode: DatasetPadMode | str = DatasetPadMode.LEFT_RIGHT) -> None:
        try:
            self.pad_mode = DatasetPadMode(pad_mode)
        except ValueError:
            raise ValueError(
                f"data.pad_mode must be one of {[mode.value for mode in DatasetPadMode]}, got {pad_mode!r}"
            ) from None

    def __call__(self, batch: list[Row]) -> Row:
        """Return one tensor per key; without padding, only 1-d tensors are joined and other values become lists."""
        if self.pad_mode is not DatasetPadMode.NO_PADDING:
            stacked = [{key: value for key, value in row.items() if key not in LISTED} for row in batch]
            return default_collate(stacked) | {key: [row[key] for row in batch] for key in LISTED if key in batch[0]}
        return {
            key: torch.nested.as_nested_tensor([row[key] for row in batch], layout=torch.jagged)
            if isinstance(value, torch.Tensor) and value.dim() == 1
            else [row[key] for row in batch]
            for key, value in batch[0].items()
        }
