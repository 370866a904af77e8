"""Floating point operations of the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, forward and backward."""

from collections.abc import Iterable, Sequence
from typing import Any


def image_lengths(inputs: Iterable[Any]) -> list[int]:
    """Return the patches of each image and each frame in the outputs of a processor, one mapping for each row."""
    lengths: list[int] = []
    for row in inputs:
        for name in ("image_grid_thw", "video_grid_thw"):
            grid = row.get(name) if row else None
            for frames, height, width in [] if grid is None else grid.tolist():
                lengths += [height * width] * frames
    return lengths


def vision_flops(config: Any, images: Sequence[int]) -> tuple[float, float, float]:
    """Count a pass over images of so many patches each; zeros for a tower that is not known.

    Returns: operations forward; backward of what weights multiply, without those of their gradients; and the latter.
    Pixels have no gradient. The pairs of attention count with the second, for which it does not matter what learns.
    """
    kind = getattr(config, "model_type", "").removesuffix("_vision")
    if kind not in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        return 0.0, 0.0, 0.0
    patches = sum(images)
    hidden = config.embed_dim if kind == "qwen2_vl" else config.hidden_size
    out = config.hidden_size if kind == "qwen2_vl" else config.out_hidden_size
    pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
    if kind == "qwen2_5_vl":
        mlp = 3 * hidden * config.intermediate_size
    else:
        mlp = 2 * hidden * (hidden * config.mlp_ratio if kind == "qwen2_vl" else config.intermediate_size)
    merged = hidden * config.spatial_merge_size**2
    mergers = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
    merger = mergers * merged * (merged + out) / config.spatial_merge_size**2  # weights for each patch
    weights = config.depth * (4 * hidden**2 + mlp) + merger
    matrices, pixel_matrix, attention = weights * patches, pixels * hidden * patches, hidden * _pairs(config, images)
    forward = 2.0 * (matrices + pixel_matrix) + 4.0 * attention
    return forward, 2.0 * matrices + 8.0 * attention, 2.0 * (matrices + pixel_matrix)


def _pairs(config: Any, images: Sequence[int]) -> int:
    """Add up over the layers how many patches each is compared with; most layers of Qwen2.5-VL have windows."""
    every = sum(patches**2 for patches in images)
    whole = getattr(config, "fullatt_block_indexes", None)
    if whole is None:
        return int(config.depth * every)
    merge = config.spatial_merge_size
    window = (config.window_size // merge // config.patch_size) ** 2 * merge**2
    inside = sum(patches * min(patches, window) for patches in images)
    return int(len(whole) * every + (config.depth - len(whole)) * inside)
