"""FLOPs of the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, forward and backward."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.utils.vision.multi_modal import RowObject, SharedRow


def image_lengths(inputs: "Iterable[SharedRow | RowObject | None]") -> list[int]:
    """Return the number of patches of each image and frame in the processor outputs of rows, or in handles to them."""
    lengths: list[int] = []
    for row in inputs:
        for name in ("image_grid_thw", "video_grid_thw"):
            grid = row.get(name) if row else None
            for frames, height, width in [] if grid is None else grid.tolist():
                lengths += [height * width] * frames
    return lengths


def vision_flops(config: "PretrainedConfig", images: Sequence[int]) -> tuple[float, float, float]:
    """Count the FLOPs of images with the given numbers of patches; zeros for an unknown tower.

    Returns: forward FLOPs, backward FLOPs of the activations, backward FLOPs of the weights. Pixels need no gradient.
    Attention scores have no weights, so their backward FLOPs count as those of activations.
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
    merger = mergers * merged * (merged + out) / config.spatial_merge_size**2  # weights per patch
    matrices = (config.depth * (4 * hidden**2 + mlp) + merger) * patches
    pixel_matrix = pixels * hidden * patches
    attention = hidden * _pairs(config, images)
    forward = 2.0 * (matrices + pixel_matrix) + 4.0 * attention
    return forward, 2.0 * matrices + 8.0 * attention, 2.0 * (matrices + pixel_matrix)


def _pairs(config: "PretrainedConfig", images: Sequence[int]) -> int:
    """Count the pairs of patches that attention compares, over all layers; most layers of Qwen2.5-VL have windows."""
    every = sum(patches**2 for patches in images)
    whole = getattr(config, "fullatt_block_indexes", None)
    if whole is None:
        return int(config.depth * every)
    merge = config.spatial_merge_size
    window = (config.window_size // merge // config.patch_size) ** 2 * merge**2
    inside = sum(patches * min(patches, window) for patches in images)
    return int(len(whole) * every + (config.depth - len(whole)) * inside)
