"""Limits on images and videos from other people: the node ``data.media``."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.base_config import BaseConfig, Violation, setting

USUAL_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "PPM", "TIFF", "AVIF", "JPEG2000")
PROGRAM_FORMATS = frozenset({"EPS"})
"""Formats that Pillow decodes by another program."""
_MOST_PIXELS = 178_000_000  # Pillow's own limit


@dataclass
class MediaConfig(BaseConfig):
    """Formats and sizes of images and videos."""

    image_formats: list[str] = setting([], f"formats of images, by their names in Pillow, beside {USUAL_FORMATS}")
    max_mb: int = setting(64, "megabytes of the largest file", at_least=1)
    max_pixels: int = setting(100_000_000, "pixels of the largest image", at_least=1, at_most=_MOST_PIXELS)
    max_s: float = setting(60.0, "seconds to fetch a file, and to decode a video", above=0)
    any_address: bool = setting(False, "rows may name private addresses, and tools any address")

    def rules(self) -> Iterator[Violation]:
        """Yield image formats whose decoder starts another program."""
        if refused := PROGRAM_FORMATS & {name.upper() for name in self.image_formats}:
            yield Violation("image_formats", self.image_formats, f"must not have {min(refused)}: it starts a program")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that an image may have."""
        return (*USUAL_FORMATS, *(name.upper() for name in self.image_formats))

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest file."""
        return self.max_mb * 1_000_000

    @property
    def max_video_pixels(self) -> int:
        """Pixels of all frames that are taken from a video: 768 of 1920 x 1080, if images have the usual limit."""
        return 16 * self.max_pixels


DEFAULT_MEDIA = MediaConfig()
