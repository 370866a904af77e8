"""The images and videos of a row, encoded together with its text by the processor."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.files import ColumnCheck, Row
from verl.utils.dataset.vision_utils import MediaError, check_image, check_video, load_video, process_image
from verl.utils.vision.positions import PositionError, vision_rope
from verl.utils.vision.positions import position_ids as vision_position_ids

MARKERS = {"image": "<image>", "video": "<video>"}
TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "second_per_grid_ts", "video_metadata"}
)
"""Processor outputs that are not model inputs: the text, and values that only position ids are computed from."""

Templater: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


def templater_of(tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> Templater:
    """Return the owner of the chat template: the processor if it has one, else the tokenizer."""
    return processor if processor is not None and getattr(processor, "chat_template", None) else tokenizer


@dataclass
class Media:
    """The loaded images of a row, and its videos as (frames (T, 3, H, W), metadata)."""

    images: list[Image.Image] = field(default_factory=list)
    videos: list[tuple[Tensor, Row]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def as_data(self) -> Row:
        """Return ``multi_modal_data``, the form that rollout engines take."""
        data: Row = {"image": self.images} if self.images else {}
        if self.videos:
            data["video"] = [(frames.numpy(), metadata) for frames, metadata in self.videos]
        return data


class MediaEncoder:
    """Load the images and videos of rows and encode prompts with a model's processor.

    Every call of the processor gets ``settings.mm_processor_kwargs``.
    """

    def __init__(self, processor: ProcessorMixin, settings: DataConfig) -> None:
        self.processor = processor
        self.keys = settings.media_columns()
        self.kwargs = dict(settings.mm_processor_kwargs)
        self.rope = vision_rope(processor)
        self.patch_size = getattr(getattr(processor, "image_processor", None), "patch_size", None) or 14

    def take(self, row: Row) -> Media:
        """Take the image and video columns out of a row and load their entries.

        Raises: MediaError naming the entry that cannot be read.
        """
        media = Media()
        for kind, key in self.keys.items():
            for index, entry in enumerate(row.pop(key, None) or []):
                try:
                    if kind == "image":
                        media.images.append(process_image(entry, image_patch_size=self.patch_size))
                    else:
                        media.videos.append(load_video(entry, image_patch_size=self.patch_size))
                except MediaError as error:
                    raise MediaError(f"column {key!r}: entry {index}: {error}") from error
        return media

    def typed(self, messages: list[Row], columns: Iterable[str]) -> list[Row]:
        """Split the markers out of message texts, for each kind of media that has a column in ``columns``."""
        kinds = {MARKERS[kind]: kind for kind, key in self.keys.items() if key in columns}
        if not kinds:
            return messages
        pattern = re.compile("(" + "|".join(map(re.escape, kinds)) + ")")
        return [{**message, "content": _parts(message.get("content"), kinds, pattern)} for message in messages]

    def encode(self, text: str, media: Media) -> Row:
        """Return the processor's output for one text: ``input_ids`` with expanded placeholders, tensors, grids.

        Raises: MediaError when text and media do not match.
        """
        inputs: Row = {"images": media.images or None, **self.kwargs}
        if media.videos:
            inputs["videos"] = [frames for frames, _ in media.videos]
            inputs["video_metadata"] = [metadata for _, metadata in media.videos]
            inputs["do_sample_frames"] = False
        try:
            encoded = self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **inputs)
        except (ValueError, IndexError, RuntimeError, StopIteration) as error:
            raise MediaError(
                f"the processor rejects its text, images and videos: {str(error) or type(error).__name__}"
            ) from error
        return dict(encoded)

    def position_ids(self, input_ids: Tensor, attention_mask: Tensor, encoded: Row) -> Tensor:
        """Return the position ids of one padded prompt: (L,), or (4, L) if the model has vision axes.

        Raises: MediaError when the number of vision tokens does not match the grids.
        """
        try:
            return vision_position_ids(self.rope, input_ids, attention_mask, encoded)
        except PositionError as error:
            raise MediaError(str(error)) from error


class TurnEncoder:
    """Encode a conversation turn by turn, each turn with its images and videos; text only without a ``media`` encoder.

    It takes the images and videos out of ``row``. Raises: MediaError when one cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, media: MediaEncoder | None, row: Row) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.columns = list(row)
        self.left = Media() if media is None else media.take(row)
        self.outputs: list[Row] = []

    def typed(self, messages: list[Row]) -> list[Row]:
        """Split the markers out of message texts."""
        return messages if self.media is None else self.media.typed(messages, self.columns)

    def encode(self, text: str, messages: list[Row]) -> list[int]:
        """Return the tokens of a text that shows the images and videos of ``messages``."""
        shown = Media()
        for part in (part for message in messages for part in message.get("content") or [] if isinstance(part, dict)):
            if part.get("type") == "image" and self.left.images:
                shown.images.append(self.left.images.pop(0))
            elif part.get("type") == "video" and self.left.videos:
                shown.videos.append(self.left.videos.pop(0))
        if self.media is None or not shown:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        encoded = self.media.encode(text, shown)
        self.outputs.append(encoded)
        return encoded["input_ids"][0].tolist()

    def vision_columns(self, input_ids: Tensor, length: int) -> Row:
        """Return ``position_ids`` and ``multi_modal_inputs`` of a row of ``length`` tokens, padded or not."""
        if self.media is None:
            return {}
        joined: Row = {}
        for name in dict.fromkeys(name for output in self.outputs for name in output):
            values = [output[name] for output in self.outputs if name in output]
            if name not in TEXT_KEYS and isinstance(values[0], Tensor):
                joined[name] = torch.cat(values)
            elif name == "second_per_grid_ts":
                joined[name] = [seconds for value in values for seconds in value]
        attended = (torch.arange(len(input_ids)) < length).long()
        positions = self.media.position_ids(input_ids, attended, joined)
        return {"position_ids": positions, "multi_modal_inputs": model_inputs(joined)}


def check_media(check: ColumnCheck, settings: DataConfig) -> None:
    """Reject broken images and videos, without decoding common formats.

    Raises: DataError naming file, row and column.
    """
    checks = {"image": check_image, "video": check_video}
    for kind, name in settings.media_columns().items():
        if name not in check.table.column_names:
            continue
        for row, entries in enumerate(check.table[name]):
            for index, entry in enumerate(entries.as_py() or []):
                try:
                    checks[kind](entry)
                except MediaError as error:
                    check.fail(name, row, f"entry {index}: {error}", f"data.{kind}_key")


def model_inputs(encoded: Row) -> Row:
    """Return ``multi_modal_inputs``: the processor's output without its text part."""
    return {name: value for name, value in encoded.items() if name not in TEXT_KEYS}


def _parts(content: str | list[Row] | None, kinds: dict[str, str], pattern: re.Pattern[str]) -> str | list[Row] | None:
    """Turn a text with markers into typed parts; drop the null keys of a content that already has parts."""
    if isinstance(content, list):
        return [{name: value for name, value in part.items() if value is not None} for part in content]
    if not isinstance(content, str) or not pattern.search(content):
        return content
    pieces = [piece for piece in pattern.split(content) if piece]
    return [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces]
