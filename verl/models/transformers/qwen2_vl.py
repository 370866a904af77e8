"""Established import path of Qwen2-VL's and Qwen2.5-VL's positions, see ``verl.utils.vision.positions``."""

from typing import Any

from torch import Tensor

from verl.utils.vision.positions import rope_of


def get_rope_index(
    processor: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the vision positions (3, L) of one sequence (L,).

    Raises: PositionError if the tokens do not match the grids.
    """
    return rope_of(processor).positions(input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask)
