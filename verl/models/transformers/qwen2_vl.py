"""Established name of the positions of Qwen2-VL and Qwen2.5-VL; see ``verl.utils.vision.positions``."""

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

    Raises: PositionError when the tokens are not those of the grids.
    """
    rope = rope_of(processor)
    return rope.positions(input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask)
