"""Pass images and videos to a vision-language model of transformers.

The vision tower runs exactly once per forward pass, over images and videos together, or over a blank image if there are
none. So all ranks that share its weights run the same number of collectives, and its weights always get a gradient.
Media that several rows share, such as the samples of one prompt, pass through the tower once. Its features replace
token embeddings before the sequence is sliced over ranks. Two forward hooks do this, without replacing model code.

Works with transformers 5.16 to 5.19, where the supported families have ``visual`` and ``language_model`` in ``model``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.models.transformers.names import REMOTE_FAMILIES, VISION_FAMILIES
from verl.utils.vision.positions import VISION_AXES, VisionRope, config_rope

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_KINDS = (("pixel_values", "image_grid_thw", "image"), ("pixel_values_videos", "video_grid_thw", "video"))
"""Keys of the processor's output, images first, and the kind of their placeholder tokens."""

Kwargs = dict[str, Any]
"""Keyword arguments of a model's forward."""
MEDIA = "media"
_FEATURES = "media_features"


@dataclass(frozen=True)
class Media:
    """The images and videos of a forward pass.

    Args:
        inputs: concatenated outputs of the processor; empty without images and videos.
        shown: key of a grid in ``inputs`` -> indices of its entries, in the order of their tokens; by default each
            entry once.
        sampled: (b, L) bool like ``input_ids``: the model sampled the token, so it is no placeholder, whatever its id.
        window: (start, width) of this rank's slice of the sequence.
        rows: the processor's output of each row, in the order of ``input_ids``; only families with remote code
            read it and ``places``.
        places: (b, L) flat place in ``input_ids`` of each column of the padded rows, -1 at padding.
    """

    sampled: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    shown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    window: tuple[int, int] | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    places: Tensor | None = None


def is_vision_config(config: "PretrainedConfig") -> bool:
    """Return whether a configuration describes a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None


def uses_media(config: "PretrainedConfig | None") -> bool:
    """Return whether models of this configuration take images as ``Media``."""
    return getattr(config, "model_type", None) in (*VISION_FAMILIES, *REMOTE_FAMILIES)


def install_vision(model: "PreTrainedModel") -> None:
    """Let a model accept ``media=Media(...)``."""
    inner: Any = model.model
    inner.register_forward_pre_hook(_merge, with_kwargs=True)
    inner.language_model.register_forward_pre_hook(_add_deep_features, with_kwargs=True)


def _merge(model: Any, args: tuple[Tensor, ...], kwargs: Kwargs) -> tuple[tuple[Tensor, ...], Kwargs] | None:
    """Replace ids and media by the embeddings for the language model."""
    media: Media | None = kwargs.pop(MEDIA, None)
    if media is None:
        return None
    ids: Tensor = kwargs.pop("input_ids")
    embeddings: Tensor = model.get_input_embeddings()(ids)
    packed = kwargs.get("packed_sequences")
    lengths = None if packed is None else packed.lengths
    places, features, deep = read_media(model.visual, model.config, media, ids, lengths)
    flat = embeddings.flatten(0, 1).index_copy(0, places, features.to(embeddings.dtype))
    embeddings = flat.view_as(embeddings)
    mask = torch.zeros_like(ids, dtype=torch.bool).flatten().index_fill(0, places, True).view_as(ids)
    deep = [part.index_select(0, places.argsort()) for part in deep]
    positions = kwargs["position_ids"]
    if media.window is not None:
        start, width = media.window
        embeddings = embeddings.narrow(1, start, width)
        positions = positions.narrow(-1, start, width)
        before = int(mask[:, :start].sum())
        mask = mask.narrow(1, start, width)
        deep = [part.narrow(0, before, int(mask.sum())) for part in deep]
    kwargs |= {"input_ids": None, "inputs_embeds": embeddings, "position_ids": positions}
    if deep:
        kwargs[_FEATURES] = (mask, deep)
    return args, kwargs


def _add_deep_features(
    _: nn.Module, args: tuple[Tensor, ...], kwargs: Kwargs
) -> tuple[tuple[Tensor, ...], Kwargs] | None:
    """Pass the features of the tower's earlier layers to the language model."""
    if _FEATURES not in kwargs:
        return None
    kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"] = kwargs.pop(_FEATURES)
    return args, kwargs


def read_media(
    tower: "PreTrainedModel",
    config: "PretrainedConfig",
    media: Media,
    ids: Tensor,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the tower on the media of tokens (b, L).

    Args: ``lengths`` of the sequences that a packed row holds; by default each row is one sequence.
    Returns: the flat places (n,) of the placeholder tokens, their features (n, hidden), and those of earlier layers
        (n, hidden) if the language model reads them. Without media all of them are empty, and still have a gradient.
    Raises: ValueError when tokens and media do not match.
    """
    shown = _collect(config, media, ids, [ids.shape[1]] * ids.shape[0] if lengths is None else lengths)
    if shown is None:
        features, deep = _run_tower(tower, *blank_image(config, ids.device))
        return ids.new_zeros(0), features[:0], [part[:0] for part in deep]
    features, deep = _run_tower(tower, shown.pixels, shown.grid)
    features, *deep = (as_shown(part, shown.sizes, shown.order) for part in (features, *deep))
    if len(shown.places) != len(features):
        raise ValueError(
            f"the prompts of a micro-batch hold {len(shown.places)} image and video tokens, but multi_modal_inputs "
            f"gives {len(features)} features: keep each row's prompt and processor output together, and do not "
            "truncate prompts within an image"
        )
    return shown.places, features, deep


@dataclass(frozen=True)
class _Shown:
    """Inputs of the vision tower and the places of its features; images come before videos.

    Args:
        grid: the grids that the tower takes.
        sizes: the number of features of each image or video.
        places: the flat places of their placeholder tokens; within a kind the order is that of the rows.
        order: the image or video that each run of these shows.
    """

    pixels: Tensor
    grid: Tensor
    sizes: list[int]
    places: Tensor
    order: list[int]


def _collect(config: "PretrainedConfig", media: Media, ids: Tensor, lengths: Sequence[int]) -> _Shown | None:
    """Find the images and videos of the sequences, which have ``lengths`` tokens; None if there are none."""
    rope = config_rope(config)
    pixels = []
    grids: list[Tensor] = []
    order: list[int] = []
    places = [at.nonzero().squeeze(1) for at in _placeholders(rope, ids.masked_fill(media.sampled, -1), lengths)]
    for (values, grid, kind), at in zip(_KINDS, places, strict=True):
        if media.inputs.get(values) is not None:
            first = sum(map(len, grids))
            pixels.append(media.inputs[values])
            grids.append(media.inputs[grid])
            order += [first + index for index in media.shown.get(grid, range(len(grids[-1])))]
        elif len(at):
            raise ValueError(f"the prompts hold {len(at)} {kind} tokens, but multi_modal_inputs has no {values}")
        else:
            grids.append(ids.new_zeros(0, VISION_AXES))
    if not pixels:
        return None
    sizes = (torch.cat(grids).prod(-1) // config.vision_config.spatial_merge_size**2).tolist()
    images, videos = grids
    return _Shown(torch.cat(pixels), rope.tower_grids(images, videos), sizes, torch.cat(places), order)


def _placeholders(rope: VisionRope, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return where flat tokens stand for images, and where for videos."""
    flat = ids.flatten()
    rows = [flat] if rope.video_span is None else flat.split(list(lengths))  # a span ends with its sequence
    images, videos = zip(*map(rope.placeholders, rows), strict=True)
    return torch.cat(images), torch.cat(videos)


def as_shown(features: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Split the features into ``sizes`` and join them in ``order``, which may repeat or omit parts."""
    if order == list(range(len(sizes))):
        return features
    parts = features.split(sizes)
    return torch.cat([parts[index] for index in order])


def _run_tower(tower: nn.Module, pixels: Tensor, grid: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the features (n, hidden), and those of earlier layers if the language model reads them."""
    trained = any(p.requires_grad for p in tower.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        output = tower(pixels, grid_thw=grid)
    return output.pooler_output, list(getattr(output, "deepstack_features", None) or [])


def blank_image(config: "PretrainedConfig", device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zero patches and the grid of the smallest possible image."""
    vision = config.vision_config
    side = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side * side, values, device=device), torch.tensor([[1, side, side]], device=device)
