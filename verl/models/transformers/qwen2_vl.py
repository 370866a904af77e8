"""Import path of Qwen2-VL's and Qwen2.5-VL's positions in the established verl interface.

See ``verl.utils.vision.positions``.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from verl.utils.json_types import Json
from verl.utils.vision.positions import rope_of

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def get_rope_index(
    processor: "ProcessorMixin",
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Tensor | Json,
) -> Tensor:
    """Return the vision positions (3, L) of one sequence (L,).

    Raises: PositionError if the tokens do not match the grids.
    """
    return rope_of(processor).positions(input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, attention_mask)
