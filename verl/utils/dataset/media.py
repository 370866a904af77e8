"""Images and videos of a row: the prompt that they stand in, and what the processor makes of both."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import ProcessorMixin

from verl.utils.dataset.files import ColumnCheck
from verl.utils.dataset.vision_utils import MediaError, check_image, check_video, load_video, process_image
from verl.utils.vision.positions import PositionError, vision_rope
from verl.utils.vision.positions import position_ids as vision_position_ids

MARKERS = {"image": "<image>", "video": "<video>"}
TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "second_per_grid_ts", "video_metadata"}
)
"""What a processor returns and the training model does not take: its text part, and what only positions need."""


@dataclass
class Media:
    """The loaded images of a row, and its videos as (frames (T, 3, H, W), metadata)."""

    images: list[Any] = field(default_factory=list)
    videos: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def as_data(self) -> dict[str, Any]:
        """Return ``multi_modal_data``, as generation engines take it."""
        data: dict[str, Any] = {"image": self.images} if self.images else {}
        if self.videos:
            data["video"] = [(frames.numpy(), metadata) for frames, metadata in self.videos]
        return data


class MediaEncoder:
    """Loads the images and videos of rows and encodes prompts with them by the processor of a model.

    Args: ``settings`` is the ``data`` node; ``mm_processor_kwargs`` in it goes to every call of the processor.
    """

    def __init__(self, processor: ProcessorMixin, settings: Mapping[str, Any]) -> None:
        self.processor = processor
        self.keys = {"image": settings.get("image_key", "images"), "video": settings.get("video_key", "videos")}
        self.kwargs = dict(settings.get("mm_processor_kwargs") or {})
        self.rope = vision_rope(processor)
        self.patch_size = getattr(getattr(processor, "image_processor", None), "patch_size", None) or 14

    def take(self, row: dict[str, Any]) -> Media:
        """Take the image and video columns out of a row and load what they hold.

        Raises: MediaError naming the entry that cannot be read.
        """
        entries = {kind: row.pop(key, None) for kind, key in self.keys.items()}
        media = Media()
        for kind, entry in ((kind, entry) for kind, values in entries.items() for entry in enumerate(values or [])):
            index, value = entry
            try:
                if kind == "image":
                    media.images.append(process_image(value, image_patch_size=self.patch_size))
                else:
                    media.videos.append(load_video(value, image_patch_size=self.patch_size))
            except MediaError as error:
                raise MediaError(f"column {self.keys[kind]!r}: entry {index}: {error}") from error
        return media

    def typed(self, messages: list[dict[str, Any]], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split markers out of the text of messages, for the kinds whose column the rows have."""
        kinds = {MARKERS[kind]: kind for kind, key in self.keys.items() if key in columns}
        if not kinds:
            return messages
        pattern = re.compile("(" + "|".join(map(re.escape, kinds)) + ")")
        return [{**message, "content": _parts(message.get("content"), kinds, pattern)} for message in messages]

    def encode(self, text: str, media: Media) -> dict[str, Any]:
        """Return what the processor makes of one text: ``input_ids`` with expanded placeholders, tensors, grids.

        Raises: MediaError when the text and the media do not fit together.
        """
        videos: dict[str, Any] = {}
        if media.videos:
            videos = {
                "videos": [frames for frames, _ in media.videos],
                "video_metadata": [metadata for _, metadata in media.videos],
                "do_sample_frames": False,
            }
        try:
            encoded = self.processor(
                text=[text],
                images=media.images or None,
                add_special_tokens=False,
                return_tensors="pt",
                **videos,
                **self.kwargs,
            )
        except (ValueError, IndexError, RuntimeError, StopIteration) as error:
            raise MediaError(
                f"the processor refuses its text, images and videos: {str(error) or type(error).__name__}"
            ) from error
        return dict(encoded)

    def position_ids(self, input_ids: Tensor, attention_mask: Tensor, encoded: Mapping[str, Any]) -> Tensor:
        """Return the position ids of one padded prompt: (L,), or (4, L) where the model has vision axes.

        Raises: MediaError when the tokens are not those of the grids.
        """
        try:
            return vision_position_ids(self.rope, input_ids, attention_mask, encoded)
        except PositionError as error:
            raise MediaError(str(error)) from error


class TurnEncoder:
    """Encodes a conversation part by part, each with its own images and videos; without a processor, text.

    Args: ``row`` are the columns of the row, out of which images and videos are taken.
    Raises: MediaError when one cannot be read.
    """

    def __init__(self, tokenizer: Any, media: MediaEncoder | None, row: dict[str, Any]) -> None:
        self.tokenizer, self.media = tokenizer, media
        self.columns = list(row)
        self.left = Media() if media is None else media.take(row)
        self.outputs: list[dict[str, Any]] = []

    def typed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split markers out of the text of messages."""
        return messages if self.media is None else self.media.typed(messages, dict.fromkeys(self.columns))

    def encode(self, text: str, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a part that shows what ``messages`` hold."""
        shown = Media()
        for part in (part for message in messages for part in message.get("content") or [] if isinstance(part, dict)):
            kept, left = {"image": (shown.images, self.left.images), "video": (shown.videos, self.left.videos)}.get(
                part.get("type", ""), (None, None)
            )
            if kept is not None and left:
                kept.append(left.pop(0))
        if self.media is None or not shown:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        encoded = self.media.encode(text, shown)
        self.outputs.append(encoded)
        ids = encoded["input_ids"][0].tolist()
        return ids

    def vision_columns(self, input_ids: Tensor, length: int) -> dict[str, Any]:
        """Return ``position_ids`` and ``multi_modal_inputs`` of a row of ``length`` tokens, padded or not."""
        if self.media is None:
            return {}
        joined: dict[str, Any] = {}
        for name in dict.fromkeys(name for output in self.outputs for name in output):
            values = [output[name] for output in self.outputs if name in output]
            if name not in TEXT_KEYS and isinstance(values[0], Tensor):
                joined[name] = torch.cat(values)
            elif name == "second_per_grid_ts":
                joined[name] = [seconds for value in values for seconds in value]
        attended = (torch.arange(len(input_ids)) < length).long()
        positions = self.media.position_ids(input_ids, attended, joined)
        return {"position_ids": positions, "multi_modal_inputs": model_inputs(joined)}


def check_media(check: ColumnCheck, settings: Mapping[str, Any]) -> None:
    """Refuse images and videos that cannot be read, as far as that is seen without decoding them.

    Raises: DataError naming file, row and column.
    """
    for kind, look in (("image", check_image), ("video", check_video)):
        key = f"{kind}_key"
        name = settings.get(key, f"{kind}s")
        if name not in check.table.column_names:
            continue
        for row, entries in enumerate(check.table[name]):
            for index, entry in enumerate(entries.as_py() or []):
                try:
                    look(entry)
                except MediaError as error:
                    check.fail(name, row, f"entry {index}: {error}", f"data.{key}")


def model_inputs(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``multi_modal_inputs``: the processor's output without its text part."""
    return {name: value for name, value in encoded.items() if name not in TEXT_KEYS}


def _parts(content: Any, kinds: Mapping[str, str], pattern: re.Pattern[str]) -> Any:
    """Return a content as typed parts where it holds a marker, and free of empty keys where it has parts already."""
    if isinstance(content, list):
        return [{name: value for name, value in part.items() if value is not None} for part in content]
    if not isinstance(content, str) or not pattern.search(content):
        return content
    pieces = [piece for piece in pattern.split(content) if piece]
    return [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces]
