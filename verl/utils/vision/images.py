"""Open images from other people; no other module of the library opens any."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from verl.errors import WrongInput
from verl.utils.failures import replacing_errors
from verl.utils.masking import MaskedError
from verl.utils.vision.limits import MediaConfig

_HEAD_BYTES = 16  # Pillow recognizes a format by these bytes


class MediaError(MaskedError, WrongInput):
    """An image or video cannot be read."""


def decoding(what: str = "image") -> AbstractContextManager[None]:
    """Turn any error of a decoder into a MediaError, since damaged files raise errors of all classes."""

    def named(error: Exception) -> MediaError:
        return MediaError(f"the {what} cannot be read: {str(error) or type(error).__name__}")

    return replacing_errors(named, passes=(MediaError,))


def open_image(source: Image.Image | BinaryIO | str, media: MediaConfig) -> Image.Image:
    """Open an image of an allowed format and size without decoding it.

    Args: ``source`` is a path, a file, or an image that is open.
    Raises: MediaError naming the format that was found.
    """
    with decoding():
        opened = source if isinstance(source, Image.Image) else _opened(source, media)
        if opened.format is not None and opened.format not in media.formats:  # an image in memory has none
            raise _wrong_format(opened.format, media)
        check_pixels(opened.width, opened.height, media)
        return opened


def check_pixels(width: int, height: int, media: MediaConfig) -> None:
    """Raise a MediaError for an image or frame that is too large."""
    if width * height > media.max_pixels:
        raise MediaError(f"the image has {width} x {height} pixels, and data.media.max_pixels={media.max_pixels}")


def _opened(source: BinaryIO | str, media: MediaConfig) -> Image.Image:
    Image.init()  # knows all formats of Pillow, and decodes nothing
    known = [name for name in media.formats if name in Image.OPEN]  # MPO is opened as JPEG
    try:
        return Image.open(source, formats=known)
    except UnidentifiedImageError:
        found = _format_of(source)
        if found is not None and found not in media.formats:
            raise _wrong_format(found, media) from None
        reason = "Pillow does not know its format" if found is None else f"it is no complete {found}"
        raise MediaError(f"the image cannot be read: {reason}") from None


def _format_of(source: BinaryIO | str) -> str | None:
    """Return the format whose first bytes a file has."""
    if isinstance(source, str):
        with Path(source).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    else:
        source.seek(0)
        head = source.read(_HEAD_BYTES)
    head = head.ljust(_HEAD_BYTES, b"\0")
    return next((name for name, (_, accepts) in Image.OPEN.items() if accepts and accepts(head) is True), None)


def _wrong_format(found: str, media: MediaConfig) -> MediaError:
    return MediaError(
        f"the image cannot be read: its format is {found}, and images may be {', '.join(media.formats)}; "
        "data.media.image_formats adds formats, except those that start another program"
    )
