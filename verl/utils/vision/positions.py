"""Position ids of prompts with images and videos (multi-modal RoPE), for families with three position axes.

Text advances all axes by one per token. An image or a video is a grid of tokens: the position of a token is its frame,
row and column, counted from the start of the grid. Text after the grid continues after its longer side.

Source: Qwen2-VL (arXiv:2409.12191), section 2.1. The results equal ``get_rope_index`` of transformers' models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

VISION_AXES = 3  # frame, row, column

_FAMILIES = {
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen2_5_VLProcessor": "qwen2_5_vl",
    "Qwen3VLProcessor": "qwen3_vl",
    "Glm4vProcessor": "glm4v",
}
_RELEASED_TOKENS_PER_SECOND = 2  # of Qwen2.5-VL, used if the processor's folder has no config.json

Seconds = Tensor | Sequence[float] | None


class PositionError(ValueError):
    """The image and video tokens of a prompt do not match its grids."""


@dataclass(frozen=True)
class VisionRope:
    """The position rules of a model family.

    ``tokens_per_second`` spaces the frames of a video by time (Qwen2.5-VL). With ``frames_apart`` every frame of a
    video is a separate grid, with its time as text next to it (Qwen3-VL, GLM-4V). ``video_span`` holds the tokens
    around a video whose frames consist of image tokens, and which the tower takes frame by frame (GLM-4V).
    """

    image_token_id: int
    video_token_id: int
    merge_size: int = 2
    tokens_per_second: float | None = None
    frames_apart: bool = False
    video_span: tuple[int, int] | None = None

    @property
    def media_tokens(self) -> frozenset[int]:
        """The tokens that stand for images and videos, and those that tell the two apart."""
        return frozenset({self.image_token_id, self.video_token_id, *(self.video_span or ())})

    def positions(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Seconds = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the vision positions (3, L) of one sequence (L,); 0 at masked positions.

        Raises: PositionError when the tokens do not match the grids.
        """
        kept = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        positions = input_ids.new_zeros(VISION_AXES, len(input_ids))
        positions[:, kept] = self._dense(input_ids[kept], image_grid_thw, video_grid_thw, second_per_grid_ts)
        return positions

    def placeholders(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masks (L,) of the tokens that stand for images, and for videos, in one sequence (L,)."""
        if self.video_span is None:
            return ids == self.image_token_id, ids == self.video_token_id
        start, end = self.video_span
        inside = (ids == start).cumsum(0) > (ids == end).cumsum(0)
        of_either = ids == self.image_token_id
        return of_either & ~inside, of_either & inside

    def tower_grids(self, images: Tensor, videos: Tensor) -> Tensor:
        """Return the grids (n, 3) that the vision tower takes for images and then videos."""
        if self.video_span is not None:
            videos = torch.repeat_interleave(videos, videos[:, 0], dim=0)
            videos[:, 0] = 1
        return torch.cat([images, videos])

    def _dense(self, ids: Tensor, images: Tensor | None, videos: Tensor | None, seconds: Seconds) -> Tensor:
        is_image, is_video = self.placeholders(ids)
        blocks = [self._blocks("image", is_image, images, None), self._blocks("video", is_video, videos, seconds)]
        first, grid, interval = (torch.cat([block[i] for block in blocks]) for i in range(3))
        sizes = grid.prod(-1)
        ahead = torch.ones_like(ids)
        ahead[is_image | is_video] = 0
        ahead[first + sizes - 1] = grid[:, 1:].amax(-1)
        base = ahead.cumsum(0) - ahead
        inner = _inside_grids(grid, interval, sizes)
        token = torch.repeat_interleave(first - (sizes.cumsum(0) - sizes), sizes) + torch.arange(len(inner))
        positions = base.expand(VISION_AXES, -1).clone()
        positions[:, token] += inner.T
        return positions

    def _blocks(
        self, kind: str, tokens: Tensor, grids: Tensor | None, seconds: Seconds
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first token (n,), merged size (n, 3) and frame interval (n,) of each grid."""
        grids = torch.zeros(0, VISION_AXES, dtype=torch.long) if grids is None else grids.cpu().long()
        interval = torch.ones(len(grids))
        if kind == "video" and self.tokens_per_second is not None:
            times = torch.ones(len(grids)) if seconds is None else torch.as_tensor(seconds).float().reshape(-1)
            interval = self.tokens_per_second * times
        merged = grids // torch.tensor([1, self.merge_size, self.merge_size])
        if kind == "video" and self.frames_apart:
            merged = torch.repeat_interleave(merged, merged[:, 0], dim=0)
            merged[:, 0] = 1
            interval = torch.ones(len(merged))
        at = tokens.nonzero()[:, 0]
        sizes = merged.prod(-1)
        if int(sizes.sum()) != len(at):
            raise PositionError(f"the prompt has {len(at)} {kind} tokens, but its {kind} grids need {int(sizes.sum())}")
        ends = sizes.cumsum(0)
        first = at[ends - sizes]
        if not torch.equal(at[ends - 1] - first, sizes - 1):
            raise PositionError(f"the {kind} tokens of a grid are not adjacent: there is other text between them")
        return first, merged, interval


def _inside_grids(grid: Tensor, interval: Tensor, sizes: Tensor) -> Tensor:
    """Return frame, row and column of every token of all grids, (sum of sizes, 3)."""
    index = torch.arange(int(sizes.sum())) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rows, columns = (torch.repeat_interleave(grid[:, axis], sizes) for axis in (1, 2))
    frame = (index // (rows * columns)).float() * torch.repeat_interleave(interval, sizes)
    return torch.stack([frame.long(), index // columns % rows, index % columns], dim=-1)


def vision_rope(processor: Any) -> VisionRope | None:
    """Return the position rules of a processor's model; None for a model with one position axis."""
    family = _FAMILIES.get(type(processor).__name__)
    if family is None:
        return None
    tokenizer = processor.tokenizer
    merge_size = processor.image_processor.merge_size
    if family == "glm4v":
        span = tuple(map(tokenizer.convert_tokens_to_ids, ("<|begin_of_video|>", "<|end_of_video|>")))
        image = tokenizer.convert_tokens_to_ids(processor.image_token)
        return VisionRope(image, image, merge_size, frames_apart=True, video_span=span)
    return VisionRope(
        image_token_id=tokenizer.convert_tokens_to_ids(processor.image_token),
        video_token_id=tokenizer.convert_tokens_to_ids(processor.video_token),
        merge_size=merge_size,
        tokens_per_second=_tokens_per_second(tokenizer.name_or_path) if family == "qwen2_5_vl" else None,
        frames_apart=family == "qwen3_vl",
    )


def config_rope(config: "PreTrainedConfig") -> VisionRope:
    """Return the position rules of a model of ``VISION_FAMILIES`` from its configuration."""
    family = config.model_type
    vision = config.vision_config
    if family == "glm4v":
        span = (config.video_start_token_id, config.video_end_token_id)
        image = config.image_token_id
        return VisionRope(image, image, vision.spatial_merge_size, frames_apart=True, video_span=span)
    return VisionRope(
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        merge_size=vision.spatial_merge_size,
        tokens_per_second=vision.tokens_per_second if family == "qwen2_5_vl" else None,
        frames_apart=family.startswith("qwen3_vl"),
    )


def rope_of(processor: "ProcessorMixin") -> VisionRope:
    """Return ``vision_rope`` of a processor.

    Raises: PositionError naming the processor when its family is unknown.
    """
    rope = vision_rope(processor)
    if rope is None:
        raise PositionError(f"{type(processor).__name__} has no vision positions: supported are {sorted(_FAMILIES)}")
    return rope


def media_texts(rope: VisionRope | None, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts of the tokens that stand for images and videos; none without vision axes."""
    tokens = frozenset() if rope is None else rope.media_tokens
    return tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(tokens))


@lru_cache
def _tokens_per_second(folder: str) -> float:
    """Return the time scale from the model's configuration in the tokenizer's folder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):  # a folder with the tokenizer only
        return _RELEASED_TOKENS_PER_SECOND
    vision = getattr(config, "vision_config", None)
    return float(getattr(vision, "tokens_per_second", _RELEASED_TOKENS_PER_SECOND))


def position_ids(
    rope: VisionRope | None, input_ids: Tensor, attention_mask: Tensor, inputs: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the position ids of one padded sequence (L,): (L,), or (4, L) if the model has vision axes.

    The first of four rows counts the text (1 at padding); the others are frame, row and column.

    Args: ``inputs`` is the processor's output: the grids, and ``second_per_grid_ts`` of videos.
    Raises: PositionError when the tokens do not match the grids.
    """
    text = attention_mask.long().cumsum(-1) - 1
    if rope is None:
        return text.clamp(min=0)
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: (inputs or {}).get(name) for name in names}
    vision = rope.positions(input_ids, attention_mask=attention_mask, **grids)
    return torch.cat([text.masked_fill(attention_mask == 0, 1).unsqueeze(0), vision])


def continued(positions: Tensor, steps: int) -> Tensor:
    """Return the positions of responses after prompts: (B, R), or (B, C, R) with several axes.

    The vision axes continue together, from the largest of them at the last token.
    """
    ahead = torch.arange(1, steps + 1, device=positions.device)
    if positions.dim() == 2:
        return positions[:, -1:] + ahead
    axes = min(VISION_AXES, positions.shape[1])
    vision = positions[:, -axes:, -1:].amax(dim=1, keepdim=True).expand(-1, axes, 1)
    return torch.cat([positions[:, :-axes, -1:], vision], dim=1) + ahead
