"""Images and videos in the forward pass of a vision-language model of transformers.

The tower runs once in every pass, over images and videos together, or over a blank image where there is none: ranks
that share its weights take part in as many collectives, and its weights have a gradient on every layout. What several
rows show, such as the samples of one prompt, it sees once. Its features are merged into the embeddings before a
sequence is sliced over ranks. Nothing of the model is replaced: two hooks stand before the inner model and its language
model.

Works with transformers 5.16 to 5.19: the families below keep ``visual`` and ``language_model`` in ``model``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Values of ``model_type`` that are laid out as described; see docs/advance/multi_modal.md for how to add one."""

_KINDS = (("pixel_values", "image_grid_thw", "image"), ("pixel_values_videos", "video_grid_thw", "video"))
"""Keys of the processor's output, images first, and the kind of token that stands for the features."""

MEDIA = "media"
_FEATURES = "media_features"


@dataclass(frozen=True)
class Media:
    """What the rows of a forward pass show, and where.

    Args:
        inputs: joined outputs of the processor, empty where no row shows anything.
        shown: by the name of a grid in ``inputs``, which of its entries the rows show, in the order of their tokens;
            without it, each once.
        sampled: (b, L) bool as ``input_ids``: tokens of the model, which stand for no image whatever their id.
        window: (start, width) of the slice of the sequence that this rank works on.
    """

    sampled: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    window: tuple[int, int] | None = None


def is_vision_config(config: "PretrainedConfig") -> bool:
    """Whether a configuration describes a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None


def uses_media(config: "PretrainedConfig | None") -> bool:
    """Whether ``Media`` is how images reach models of this configuration."""
    return getattr(config, "model_type", None) in FAMILIES


def install_vision(model: "PreTrainedModel") -> None:
    """Let a model take ``media=Media(...)``."""
    inner: Any = model.model
    inner.register_forward_pre_hook(_merge, with_kwargs=True)
    inner.language_model.register_forward_pre_hook(_add_deep_features, with_kwargs=True)


def _merge(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Turn ids and media into the embeddings that the language model reads."""
    media: Media | None = kwargs.pop(MEDIA, None)
    if media is None:
        return None
    ids: Tensor = kwargs.pop("input_ids")
    embeddings: Tensor = model.get_input_embeddings()(ids)
    mask, deep = torch.zeros_like(ids, dtype=torch.bool), []
    pixels, grid, places, order = _collect(model, media, ids)
    if pixels is None:
        features, unread = _run_tower(model.visual, *blank_image(model, ids.device))
        nothing = torch.stack([part.sum() for part in (features, *unread)]).sum() * 0.0
        embeddings = embeddings + nothing.to(embeddings.dtype)
    else:
        features, deep = _run_tower(model.visual, pixels, grid)
        sizes = (grid.prod(-1) // model.visual.spatial_merge_size**2).tolist()
        features, *deep = (_as_shown(part, sizes, order) for part in (features, *deep))
        _check_count(places, features)
        flat = embeddings.flatten(0, 1).index_copy(0, places, features.to(embeddings.dtype))
        embeddings = flat.view_as(embeddings)
        mask = mask.flatten().index_fill(0, places, True).view_as(ids)
        deep = [part.index_select(0, places.argsort()) for part in deep]
    positions = kwargs["position_ids"]
    if media.window is not None:
        embeddings, positions = embeddings.narrow(1, *media.window), positions.narrow(-1, *media.window)
        mask, deep = _slice_deep(mask, deep, *media.window)
    kwargs |= {"input_ids": None, "inputs_embeds": embeddings, "position_ids": positions}
    if deep:
        kwargs[_FEATURES] = (mask, deep)
    return args, kwargs


def _add_deep_features(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Hand the features of earlier layers of the tower to the layers of the language model."""
    if _FEATURES not in kwargs:
        return None
    kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"] = kwargs.pop(_FEATURES)
    return args, kwargs


def _collect(model: Any, media: Media, ids: Tensor) -> tuple[Tensor | None, Tensor, Tensor, list[int]]:
    """Return patches and grids of images, then of videos, the flat places of their tokens, and what these show.

    Places and what they show, as indices of grids, are in the order of the rows, images before videos.
    """
    pixels, grids, places = [], [], []
    order: list[int] = []
    for values, grid, kind in _KINDS:
        stands_for = (ids == getattr(model.config, f"{kind}_token_id")) & ~media.sampled
        at = stands_for.flatten().nonzero().squeeze(1)
        places.append(at)
        if media.inputs.get(values) is not None:
            first = sum(map(len, grids))
            pixels.append(media.inputs[values])
            grids.append(media.inputs[grid])
            order += [first + index for index in media.shown.get(grid, range(len(grids[-1])))]
        elif len(at):
            raise MediaError(f"{len(at)} {kind} tokens stand in the prompts, but multi_modal_inputs has no {values}")
    if not pixels:
        return None, ids, places[0], order
    return torch.cat(pixels), torch.cat(grids), torch.cat(places), order


def _as_shown(features: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Return the features of images, so many of each, in another order and as often as that names them."""
    if order == list(range(len(sizes))):
        return features
    parts = features.split(sizes)
    return torch.cat([parts[index] for index in order])


def _run_tower(tower: Any, pixels: Tensor, grid: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the features (n, hidden), and those of earlier layers where the language model reads them."""
    trained = any(p.requires_grad for p in tower.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        output = tower(pixels, grid_thw=grid)
    return output.pooler_output, list(getattr(output, "deepstack_features", None) or [])


def _check_count(places: Tensor, features: Tensor) -> None:
    if len(places) != len(features):
        raise MediaError(
            f"{len(places)} image and video tokens stand in the prompts of a micro-batch, but multi_modal_inputs makes "
            f"{len(features)} features: keep the prompt and the processor's output of a row together, and do not "
            "truncate prompts within an image"
        )


def _slice_deep(mask: Tensor, deep: list[Tensor], start: int, width: int) -> tuple[Tensor, list[Tensor]]:
    before, own = int(mask[:, :start].sum()), mask.narrow(1, start, width)
    return own, [part.narrow(0, before, int(own.sum())) for part in deep]


def blank_image(model: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the patches and the grid of the smallest image, all zero."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side * side, values, device=device), torch.tensor([[1, side, side]], device=device)


class MediaError(ValueError):
    """Prompts and images of a batch do not fit each other."""
