"""The images and videos of a row: loading in the sizes that models take, and encoding together with its text.

Sizes and frame sampling follow qwen-vl-utils. That package is imported for videos only, because it needs torchvision.
"""

import base64
import inspect
import io
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.chat.others import media_parts, text_tokens
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.files import ColumnCheck, Row
from verl.utils.fs import readable_file
from verl.utils.vision.fetching import fetch, scheme_of
from verl.utils.vision.images import MediaError as MediaError
from verl.utils.vision.images import check_pixels, decoding, open_image
from verl.utils.vision.limits import DEFAULT_MEDIA, MediaConfig
from verl.utils.vision.positions import PositionError, vision_rope
from verl.utils.vision.positions import position_ids as vision_position_ids

MERGE = 2  # patches per token, along each side
USUAL_FACTOR = 14 * MERGE
MIN_TOKENS = 4  # per image
MAX_TOKENS = 16384  # per image
MAX_RATIO = 200
FRAMES_PER_SECOND = 2.0  # assumed for frames without a rate

Described = Mapping[str, Any]
"""An image or video with its wishes, as a data row holds it: path, bytes or frames, and sizes or rates."""
ImageLike = Image.Image | bytes | str | Described


class MissingVideoSupportError(MediaError, ImportError):
    """A library that videos need is not installed."""


class VideoFormError(MediaError, NotImplementedError):
    """A video is not a dict with the key ``video``."""


def process_image(image: ImageLike, image_patch_size: int = 14, media: MediaConfig = DEFAULT_MEDIA) -> Image.Image:
    """Load an image as RGB and resize it to a whole number of tokens within the limits.

    Args:
        image: a PIL image, its encoded bytes, a path, a URL (``file://``, ``http(s)://``, ``data:``), or a dict with
            one of these under ``bytes``, ``path``, ``image``, ``image_url`` or ``url``, and optionally
            ``min_pixels``, ``max_pixels``, or ``resized_height`` and ``resized_width``.
        image_patch_size: side of a patch of the model's vision tower, in pixels.
        media: the formats and sizes that it may have.

    Raises: MediaError when it cannot be read.
    """
    loaded = load_image(image, media)
    height, width = _target_size(image, loaded, image_patch_size * MERGE, media)
    return loaded.resize((width, height))


def _target_size(image: ImageLike, loaded: Image.Image, factor: int, media: MediaConfig) -> tuple[int, int]:
    """Return the height and width for an image; the sizes in its dict take precedence.

    Raises: MediaError for sizes that are no numbers, or too large.
    """
    names = ("resized_height", "resized_width", "min_pixels", "max_pixels")
    spec = {name: image.get(name) for name in names} if isinstance(image, Mapping) else dict.fromkeys(names)
    try:
        height, width, least, most = (None if value is None else int(value) for value in spec.values())
    except (TypeError, ValueError) as error:
        raise MediaError(f"the sizes of an image must be numbers of pixels, got {spec}") from error
    if height and width:
        return smart_resize(height, width, factor)
    height, width = smart_resize(loaded.height, loaded.width, factor, least, most)
    if height * width > MAX_TOKENS * factor**2:  # only possible if the image's dict sets its limits
        check_pixels(width, height, media)
    return height, width


def load_image(image: ImageLike, media: MediaConfig = DEFAULT_MEDIA) -> Image.Image:
    """Decode a whole image as RGB: transparent pixels become white, and 16 bits become 8.

    Raises: MediaError when it cannot be read.
    """
    opened = open_image(_source(image, media), media)
    with decoding():
        opened.load()
        return _as_rgb(opened)


def _as_rgb(opened: Image.Image) -> Image.Image:
    if opened.mode.startswith("I"):  # 16 bits; PIL's own conversion would clip at 255
        opened = Image.fromarray((np.asarray(opened).clip(0, 65535) >> 8).astype(np.uint8))
    if opened.mode == "F":
        raise MediaError("the image has floating-point pixels: save it with 8 bits per channel")
    if not opened.has_transparency_data:
        return opened.convert("RGB")
    opened = opened.convert("RGBA")
    white = Image.new("RGB", opened.size, (255, 255, 255))
    white.paste(opened, mask=opened.getchannel("A"))
    return white


def check_image(image: ImageLike, media: MediaConfig = DEFAULT_MEDIA) -> None:
    """Check an image without decoding the pixels of common formats.

    The checks are: header, sizes, checksums if the format has them, and the end marker of a JPEG.

    Raises: MediaError when the image is truncated or has a shape that models cannot take.
    """
    source = _source(image, media)
    opened = open_image(source, media)
    _target_size(image, opened, USUAL_FACTOR, media)
    if isinstance(source, Image.Image):
        return
    with decoding(), opened:
        opened.verify()
        if opened.format == "JPEG" and not _ends_as_jpeg(source):
            raise MediaError("the image cannot be read: it is truncated")
    if opened.format not in _VERIFIED:
        load_image(image, media)


_VERIFIED = ("PNG", "JPEG", "WEBP")  # Pillow's verify() reads only the header of other formats


def _ends_as_jpeg(source: str | io.BytesIO) -> bool:
    with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        return b"\xff\xd9" in file.read()


def _source(image: ImageLike, media: MediaConfig) -> Image.Image | io.BytesIO | str:
    """Return an image in memory, its encoded bytes, or a path.

    Raises: MediaError for a file that is too large, and for a path that is no file.
    """
    if isinstance(image, Mapping):
        given = [name for name in ("bytes", "image", "image_url", "url") if image.get(name) is not None]
        if "bytes" in given and len(given) > 1:
            raise MediaError(f"an image must have bytes or a path, not both: got {given}")
        names = given or [name for name in ("path",) if image.get(name)]
        if not names:
            raise MediaError(f"an image must have bytes, path, image, image_url or url, got {_short(image)}")
        return _source(image[names[0]], media)
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, bytes | bytearray):
        _check_bytes(len(image), media)
        return io.BytesIO(image)
    if not isinstance(image, str):
        raise MediaError(f"an image must be a PIL image, bytes, a path, a URL or a dict, got {type(image).__name__}")
    if image.startswith("data:"):
        return io.BytesIO(_decoded(image, media))
    if scheme_of(image) is not None:
        return io.BytesIO(fetch(image, media))
    with decoding():
        return _checked_path(image, media)


def _checked_path(source: str, media: MediaConfig) -> str:
    """Return the path of a local file. Raises: OSError if it is no file; MediaError if it is too large."""
    path = str(readable_file(_local(source)))
    _check_bytes(os.path.getsize(path), media)
    return path


def _check_bytes(num_bytes: int, media: MediaConfig) -> None:
    if num_bytes > media.max_bytes:
        raise MediaError(f"the file has {num_bytes} bytes or more, and data.media.max_mb={media.max_mb}")


def _decoded(url: str, media: MediaConfig) -> bytes:
    """Return the content of a ``data:`` URL. Raises: MediaError."""
    _check_bytes(len(url) * 3 // 4, media)
    try:
        return base64.b64decode(url.partition("base64,")[2])
    except ValueError as error:
        raise MediaError(f"the image {_short(url)} cannot be fetched: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int | None = None, max_pixels: int | None = None
) -> tuple[int, int]:
    """Return the nearest sides that ``factor`` divides, with their product within the limits.

    Raises: MediaError when one side is more than ``MAX_RATIO`` times the other.
    """
    least = MIN_TOKENS * factor**2 if min_pixels is None else min_pixels
    most = MAX_TOKENS * factor**2 if max_pixels is None else max_pixels
    if not 0 < least <= most:
        raise MediaError(f"min_pixels must be positive and at most max_pixels, got {least} and {most}")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise MediaError(f"one side of an image may be at most {MAX_RATIO} times the other, got {height} x {width}")
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


# ---- videos


def process_video(
    video: Described,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int | None = None,
    fps_max_frames: int | None = None,
    image_patch_size: int = 14,
    media: MediaConfig = DEFAULT_MEDIA,
) -> Tensor:
    """Load a video: (frames, 3, height, width) uint8; see ``load_video``."""
    return load_video(video, nframes, fps, fps_min_frames, fps_max_frames, image_patch_size, media)[0]


def load_video(
    video: Described,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int | None = None,
    fps_max_frames: int | None = None,
    image_patch_size: int = 14,
    media: MediaConfig = DEFAULT_MEDIA,
) -> tuple[Tensor, Row]:
    """Load a video and the times of its frames.

    Args:
        video: a dict with a path or a list of frames (images as in ``process_image``) under ``video``; optional keys
            are ``nframes`` or ``fps``, ``min_frames`` and ``max_frames``, ``sample_fps`` for a list, and pixel limits.
        nframes, fps, fps_min_frames, fps_max_frames: replace the keys of the dict.
        media: the formats and sizes that its frames may have.

    Returns: frames (T, 3, H, W) uint8, and metadata in the form that transformers' processors take.
    Raises: VideoFormError when ``video`` is no such dict; MediaError when it cannot be read; MissingVideoSupportError
        without qwen-vl-utils, torchvision or, for files, PyAV.
    """
    given = {"nframes": nframes, "fps": fps, "min_frames": fps_min_frames, "max_frames": fps_max_frames}
    spec = _described(video) | {name: value for name, value in given.items() if value is not None}
    if "nframes" in spec and "fps" in spec:
        raise MediaError(f"a video takes nframes or fps, not both: got nframes={spec['nframes']}, fps={spec['fps']}")
    fetch_video = _qwen_vl_utils().fetch_video
    if isinstance(spec["video"], str):
        spec |= _read_file(spec, media)
    else:
        spec["video"] = _loaded_frames(spec["video"], media)
        spec.setdefault("sample_fps", spec.get("fps", FRAMES_PER_SECOND))
    _check_frames(spec, image_patch_size * MERGE, media)
    indices = spec.pop("frames_indices", None)
    total = spec.pop("total_num_frames", None)
    fps = float(spec.get("raw_fps") or spec["sample_fps"])
    try:
        frames, _ = fetch_video(spec, image_patch_size=image_patch_size, return_video_metadata=True)
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:  # raised for bad sizes and limits
        raise MediaError(f"the video has impossible sizes or pixel limits: {error}") from error
    count = len(frames)
    return frames.round().clamp(0, 255).to(torch.uint8), {
        "fps": fps,
        "frames_indices": list(range(count)) if indices is None else (indices + [indices[-1]] * count)[:count],
        "total_num_frames": int(total or count),
        "duration": (total or count) / fps,
        "video_backend": "pyav",
    }


def _loaded_frames(frames: Iterable[ImageLike], media: MediaConfig) -> list[Image.Image]:
    """Decode the frames of a list until they have too many pixels. Raises: MediaError."""
    loaded: list[Image.Image] = []
    pixels = 0
    for frame in frames:
        loaded.append(load_image(frame, media))
        pixels += loaded[-1].width * loaded[-1].height
        _check_all_pixels(pixels, media)
    return loaded


def _check_all_pixels(count: int, media: MediaConfig) -> None:
    if count > media.max_video_pixels:
        raise MediaError(
            f"the frames that are taken from the video have {count} pixels, and 16 * data.media.max_pixels="
            f"{media.max_video_pixels}: take fewer (nframes, fps, max_frames), or smaller ones (max_pixels)"
        )


def _check_frames(spec: Described, factor: int, media: MediaConfig) -> None:
    """Reject a decoded video without frames, with frames of several sizes or too many pixels, or with a bad rate.

    Raises: MediaError.
    """
    if not spec["video"]:
        raise MediaError("a video has no frame")
    sizes = {frame.size for frame in spec["video"]}
    if len(sizes) > 1:
        raise MediaError(f"the frames of a video must have one size, got {sorted(sizes)}")
    rate = spec["sample_fps"]
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise MediaError(f"fps and sample_fps of a video must be positive, got {rate!r}")
    height, width = _target_size(spec, spec["video"][0], factor, media)
    _check_all_pixels(len(spec["video"]) * height * width, media)


def check_video(video: Described, media: MediaConfig = DEFAULT_MEDIA) -> None:
    """Check a video without decoding it: its form, that its file exists, and the frames of a list.

    Raises: MediaError when it cannot be read.
    """
    source = _described(video)["video"]
    if not isinstance(source, str):
        for frame in source:
            check_image(frame, media)
    elif (scheme := scheme_of(source)) is None and not os.path.exists(_local(source)):
        raise MediaError(f"the video {_short(source)} cannot be read: no such file")
    elif scheme not in (None, "http", "https"):
        raise MediaError(f"the video {_short(source)} cannot be read: write a path, or an address with https://")
    elif scheme is None:
        try:
            _checked_path(source, media)
        except OSError as error:
            raise MediaError(f"the video {_short(source)} cannot be read: {error}") from error


_WISHES = (
    *("nframes", "fps", "min_frames", "max_frames", "sample_fps", "raw_fps"),
    *("resized_height", "resized_width", "min_pixels", "max_pixels", "total_pixels"),
)
"""Numbers that a row may give with a video."""
_LARGEST_WISH = 1e12


def _described(video: Described) -> Row:
    """Return a video and the numbers in its dict, such as its frame rate.

    Raises: VideoFormError when it is no dict with ``video``; MediaError when a value is no number.
    """
    source = video.get("video") if isinstance(video, Mapping) else None
    if not isinstance(source, str | list | tuple | np.ndarray):
        raise VideoFormError('a video must be a dict such as {"video": path or list of frames, "fps": 2.0}')
    wishes = {name: video[name] for name in _WISHES if video.get(name) is not None}
    for name, wish in wishes.items():
        is_number = isinstance(wish, int | float | np.integer | np.floating) and not isinstance(wish, bool)
        if not is_number or not 0 <= wish <= _LARGEST_WISH:
            raise MediaError(f"{name} of a video must be a number from 0 to {_LARGEST_WISH:g}, got {_short(wish)}")
    return {"video": source, **wishes}


def _local(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://"))


def _qwen_vl_utils() -> ModuleType:
    try:
        from qwen_vl_utils import vision_process
    except ImportError as error:
        raise MissingVideoSupportError(
            f"videos need qwen-vl-utils and torchvision: {error}; pip install 'verl[geo]', or drop the column"
        ) from error
    return vision_process


def _read_file(spec: Described, media: MediaConfig) -> Row:
    """Decode a video file and pick frames at the requested rate."""
    path = str(spec["video"])
    content = fetch(path, media) if scheme_of(path) is not None else None
    end = time.monotonic() + media.max_s
    with decoding(f"video {path!r}"):
        rate = FRAMES_PER_SECOND
        total = 0
        largest = 0
        for stream, frame in _decoded_frames(path, content, media, end):
            rate = float(stream.average_rate or FRAMES_PER_SECOND)
            total = total + 1
            largest = max(largest, frame.width * frame.height)
        try:
            count = _qwen_vl_utils().smart_nframes(dict(spec), total_frames=total, video_fps=rate)
        except ValueError as error:
            raise MediaError(f"the video {path!r} has {total} frames: {error}") from error
        _check_all_pixels(count * largest, media)
        indices = np.linspace(0, total - 1, count).round().astype(int).tolist()
        wanted = set(indices)
        frames = enumerate(_decoded_frames(path, content, media, end))
        kept = {at: frame.to_image() for at, (_, frame) in frames if at in wanted}
        images = [kept[at] for at in indices]
    return {
        "video": images,
        "sample_fps": count / total * rate,
        "raw_fps": rate,
        "frames_indices": indices,
        "total_num_frames": total,
    }


_VIDEO_FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,flv,ogg,gif,asf,ivf,h264,hevc"
"""Demuxers of FFmpeg that read one file. Others read lists of files and addresses."""


def _decoded_frames(path: str, content: bytes | None, media: MediaConfig, end: float) -> Iterator[tuple[Any, Any]]:
    """Yield the frames of a video with their stream, one at a time: all of them can take a thousand times its size.

    Args: ``content`` is that of a file that was fetched; None for a local file. ``end`` is a ``time.monotonic()``.
    Raises: MediaError at that time; MissingVideoSupportError without PyAV.
    """
    try:
        import av
    except ImportError as error:
        raise MissingVideoSupportError(f"video files need PyAV: {error}; pip install 'verl[geo]'") from error

    options = {"format_whitelist": _VIDEO_FORMATS, "protocol_whitelist": "none"}
    with io.BytesIO(content) if content is not None else open(_checked_path(path, media), "rb") as file:
        opened: Any = av.open(file, options=options)
        with opened as container:
            stream = container.streams.video[0]
            check_pixels(stream.width, stream.height, media)
            for packet in container.demux(stream):
                for frame in packet.decode():
                    check_pixels(frame.width, frame.height, media)
                    yield stream, frame
                if time.monotonic() > end:
                    raise MediaError(f"the video {path!r} takes longer to decode than data.media.max_s={media.max_s:g}")


# ---- the images and videos of a row

MARKERS = {"image": "<image>", "video": "<video>"}
TEXT_KEYS = frozenset(
    {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels"}
    | {"second_per_grid_ts", "video_metadata"}
)
"""Processor outputs that are not model inputs: the text, values that only position ids are computed from, and what
engines make for whole rows (``verl.models.transformers.token_inputs``)."""

Templater: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


def templater_of(tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> Templater:
    """Return the owner of the chat template: the processor if it has one, else the tokenizer."""
    return processor if processor is not None and getattr(processor, "chat_template", None) else tokenizer


def kinds_of(processor: ProcessorMixin | None) -> tuple[str, ...]:
    """Return the kinds of media that a processor supports; videos count even if their only obstacle is torchvision."""
    if processor is None:
        return ()
    takes = {
        "image": hasattr(processor, "image_processor"),
        "video": hasattr(processor, "video_processor") or "videos" in inspect.signature(processor.__call__).parameters,
    }
    return tuple(kind for kind in MARKERS if takes[kind])


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
        self.limits = settings.media
        self.kwargs = dict(settings.mm_processor_kwargs or {})
        self.rope = vision_rope(processor)
        own = getattr(getattr(processor, "image_processor", None), "patch_size", None)
        self.patch_size = settings.image_patch_size or own or 14

    def take(self, row: Row) -> Media:
        """Take the image and video columns out of a row and load their entries.

        Raises: MediaError naming the entry that cannot be read.
        """
        media = Media()
        for kind, key in self.keys.items():
            for index, entry in enumerate(row.pop(key, None) or []):
                try:
                    if kind == "image":
                        media.images.append(process_image(entry, self.patch_size, self.limits))
                    else:
                        media.videos.append(load_video(entry, image_patch_size=self.patch_size, media=self.limits))
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
            return text_tokens(self.tokenizer, text)
        ids: list[int] = []
        for piece, images, videos in media_parts(text, self.media.processor, shown.images, shown.videos):
            encoded = self.media.encode(piece, Media(images, videos))
            self.outputs.append(encoded)
            ids += encoded["input_ids"][0].tolist()
        return ids

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
                    checks[kind](entry, settings.media)
                except MediaError as error:
                    check.fail(name, row, f"entry {index}: {error}", f"data.{kind}_key")


def encoded_media(processor: Any, media: Described, kwargs: Described) -> Row:
    """Encode ``multi_modal_data`` with a processor, without text: images, and videos as (frames, metadata)."""
    images = list(media.get("image") or ())
    videos = list(media.get("video") or ())
    if not images and not videos:
        return {}
    shown: Row = {"images": images} if images else {}
    if videos:
        shown["videos"] = [frames for frames, _ in videos]
        shown["video_metadata"] = [metadata for _, metadata in videos]
        shown["do_sample_frames"] = False
    text = processor.image_token * len(images) + processor.video_token * len(videos)
    return dict(processor(text=[text], add_special_tokens=False, return_tensors="pt", **shown, **kwargs))


def model_inputs(encoded: Row) -> Row:
    """Return ``multi_modal_inputs``: the processor's output without its text part."""
    return {name: value for name, value in encoded.items() if name not in TEXT_KEYS}


def process_multi_modal_inputs_for_minicpmo(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    multi_modal_inputs: Mapping[str, list[list[Tensor]]],
) -> dict[str, Row]:
    """Return the argument ``data`` of MiniCPM-o's own forward for packed rows that all have images.

    For code that calls the model itself; verl's engines do not.

    Args:
        input_ids: (1, T) packed tokens, with ``position_ids`` (1, T) and ``cu_seqlens`` (B + 1,).
        attention_mask: (B, L) of the rows before packing, left-padded.
        multi_modal_inputs: ``extract_multi_modal_inputs`` of the rows: a list with an entry for each.

    Returns: ``{"data": ...}`` as of one row, with ``image_bound`` in packed places.
    """
    pads = attention_mask.long().argmax(dim=1)
    bounds = [
        torch.as_tensor(bound).to(pads.device) - pad + start
        for bound, pad, start in zip(multi_modal_inputs["image_bound"], pads, cu_seqlens[:-1], strict=True)
    ]
    packed = {
        "pixel_values": [[part for row in multi_modal_inputs["pixel_values"] for part in row]],
        "image_bound": [torch.vstack(bounds)],
        "tgt_sizes": [torch.vstack([torch.as_tensor(sizes) for sizes in multi_modal_inputs["tgt_sizes"]])],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
    }
    return {"data": {**multi_modal_inputs, **packed}}


def _parts(content: str | list[Row] | None, kinds: dict[str, str], pattern: re.Pattern[str]) -> str | list[Row] | None:
    """Turn a text with markers into typed parts."""
    if not isinstance(content, str) or not pattern.search(content):
        return content
    pieces = [piece for piece in pattern.split(content) if piece]
    return [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces]
