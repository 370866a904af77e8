"""Pass images and videos of prompts to vLLM with the tokens and positions that training uses."""

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.models.transformers.names import VISION_FAMILIES
from verl.protocol import DataProto
from verl.utils.vision.multi_modal import resolve
from verl.utils.vision.positions import VisionRope, config_rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.workers.config import RolloutConfig

logger = logging.getLogger(__name__)

Request = dict[str, Any]
"""A prompt for vLLM: ``prompt_token_ids``, and ``multi_modal_data`` if it has images or videos."""


def media_arguments(config: "RolloutConfig") -> dict[str, bool | dict[str, int]]:
    """Return the engine's arguments for a vision model, which needs its tokenizer to turn images into tokens."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, bool | dict[str, int]] = {"skip_tokenizer_init": False}
    if "mm_device_do_normalize" in {field.name for field in dataclasses.fields(EngineArgs)}:
        # A model that normalises pixels holds constants for it, which dummy loading overwrites and no sync restores.
        arguments["mm_device_do_normalize"] = False
    if config.limit_images is not None:
        arguments["limit_mm_per_prompt"] = {"image": config.limit_images}
    return arguments


def requests_of(prompts: DataProto, token_ids: Sequence[list[int]]) -> list[Request]:
    """Return vLLM's requests: tokens with one placeholder for each image or video, and the images and videos."""
    requests: list[Request] = [{"prompt_token_ids": ids} for ids in token_ids]
    media = prompts.non_tensor_batch.get("multi_modal_data")
    if media is not None:
        for request, data in zip(requests, resolve(media), strict=True):
            if data:
                request |= media_of(data)
    return requests


def media_of(data: Mapping[str, Any]) -> Request:
    """Return the part of a request that holds images and videos, whose frames the data set or a tool has chosen."""
    if not data.get("video"):
        return {"multi_modal_data": dict(data)}
    unsampled = {"do_sample_frames": False}
    # GLM-4V in vLLM reads do_sample_frames from the metadata.
    chosen = [(frames, metadata | unsampled) for frames, metadata in data["video"]]
    return {"multi_modal_data": {**data, "video": chosen}, "mm_processor_kwargs": unsampled}


def use_training_positions(model: nn.Module, hf_config: "PreTrainedConfig") -> None:
    """Make the engine's model compute the positions of images and videos as training does.

    After a video, vLLM starts the text behind the last frame, transformers behind the longer side of a frame. A
    placeholder token without an image, which a model may sample, is text.
    """
    if hf_config.model_type not in VISION_FAMILIES or not hasattr(model, "get_mrope_input_positions"):
        return
    rope = config_rope(hf_config)
    parameters = inspect.signature(model.get_mrope_input_positions)  # type: ignore[arg-type]

    def positions(input_tokens: list[int], mm_features: Sequence[Any], **more: Any) -> tuple[torch.Tensor, int]:
        parameters.bind(input_tokens, mm_features, **more)
        ordered = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        grids: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
        seconds: list[float] = []
        for feature in ordered:
            grids[feature.modality].append(feature.data[f"{feature.modality}_grid_thw"].data)
            if "second_per_grid_ts" in feature.data:
                seconds.append(float(feature.data["second_per_grid_ts"].data))
        images, videos = (torch.stack(grids[kind]) if grids[kind] else None for kind in ("image", "video"))
        found = rope.positions(_without_others(rope, input_tokens, ordered), images, videos, seconds or None)
        return found, int(found[:, -1].max()) + 1 - len(input_tokens)

    model.get_mrope_input_positions = positions  # type: ignore[assignment]


def _without_others(rope: VisionRope, input_tokens: Sequence[int], features: Sequence[Any]) -> torch.Tensor:
    """Return the tokens (L,) with -1 in place of placeholders that belong to no image or video."""
    ids = torch.tensor(input_tokens)
    shown = torch.zeros(len(ids), dtype=torch.bool)
    for feature in features:
        place = feature.mm_position
        shown[place.offset : place.offset + place.length] = True
    stands = (ids == rope.image_token_id) | (ids == rope.video_token_id)
    return ids.masked_fill(stands & ~shown, -1)
