"""Images that other people made: which formats are opened, and what damaged ones raise."""

import base64
import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, PngImagePlugin

from verl.base_config import ConfigError
from verl.utils.dataset.vision_utils import MediaError, check_image, load_image, load_video, process_image
from verl.utils.vision.limits import USUAL_FORMATS, MediaConfig

PICTURE = Image.frombytes("RGB", (60, 40), bytes(range(240)) * 30)
LOOKS = (check_image, process_image)


def encoded(kind: str, image: Image.Image = PICTURE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the files that Pillow would give to Ghostscript."""
    started: list[Any] = []

    def ghostscript(*args: Any) -> Any:
        started.append(args)
        return PICTURE.im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    yield started


POSTSCRIPT = encoded("EPS")
POSTSCRIPTS = {
    "as saved": POSTSCRIPT,
    "for a printer": POSTSCRIPT.replace(b"%!PS-Adobe-3.0 EPSF-3.0", b"%!PS-Adobe-3.0"),
    "with a preview": b"\xc5\xd0\xd3\xc6" + struct.pack("<7I", 32, len(POSTSCRIPT), 0, 0, 0, 0, 0) + POSTSCRIPT,
    "with other line ends": POSTSCRIPT.replace(b"\n", b"\r\n"),
}
FORMS = {
    "bytes": lambda data, path: data,
    "bytes of a row": lambda data, path: {"bytes": data, "path": "x.png"},
    "path": lambda data, path: str(path),
    "file address": lambda data, path: f"file://{path}",
    "path of a row": lambda data, path: {"image": str(path)},
    "data address": lambda data, path: "data:image/png;base64," + base64.b64encode(data).decode(),
    "opened": lambda data, path: Image.open(path),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", POSTSCRIPTS)
def test_postscript_starts_no_program(case: str, form: str, look: Any, started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(POSTSCRIPTS[case])
    image = FORMS[form](POSTSCRIPTS[case], path)
    for media in (MediaConfig(), MediaConfig(image_formats=["ICO"])):
        with pytest.raises(MediaError, match="its format is EPS, and images may be PNG, JPEG, "):
            look(image, media=media)
    assert not started


def test_frames_of_a_video_are_images_too(started: list[Any]) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    with pytest.raises(MediaError, match="its format is EPS"):
        load_video({"video": [POSTSCRIPT, POSTSCRIPT]})
    assert not started


def test_no_key_allows_what_starts_a_program() -> None:
    for name in ("EPS", "eps", "Eps"):
        with pytest.raises(ConfigError, match="image_formats=.*must not have EPS: it starts a program"):
            MediaConfig(image_formats=["ICO", name])


@pytest.mark.parametrize("kind", [*USUAL_FORMATS, "PBM", "PGM"])
def test_usual_formats_are_read(kind: str) -> None:
    image = {"PBM": PICTURE.convert("1"), "PGM": PICTURE.convert("L")}.get(kind, PICTURE)
    options = {"save_all": True, "append_images": [PICTURE]} if kind == "MPO" else {}
    data = encoded("PPM" if kind in ("PBM", "PGM") else kind, image, **options)
    check_image(data)
    assert load_image(data).size == PICTURE.size


OTHERS = "BLP DDS DIB ICNS ICO MSP PCX QOI SGI XBM PIXAR SUN FLI PSD".split()


def of_other_format(kind: str) -> bytes:
    if kind in ("MSP", "XBM"):
        return encoded(kind, PICTURE.convert("1"))
    if kind == "BLP":
        return encoded(kind, PICTURE.convert("P"))
    heads = {"PSD": b"8BPS", "SUN": b"\x59\xa6\x6a\x95", "PIXAR": b"\x80\xe8\0\0", "FLI": b"\0\0\0\0\x11\xaf"}
    return heads[kind] + bytes(200) if kind in heads else encoded(kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_named(kind: str) -> None:
    data = of_other_format(kind)
    for look in LOOKS:
        with pytest.raises(MediaError, match=f"its format is {kind}, .*data.media.image_formats adds formats"):
            look(data)


def test_a_key_adds_formats() -> None:
    for kind in ("ICO", "SGI", "PCX"):
        assert load_image(of_other_format(kind), MediaConfig(image_formats=[kind.lower()])).width
    with pytest.raises(MediaError, match="its format is PCX"):
        load_image(of_other_format("PCX"), MediaConfig(image_formats=["SGI", "NO_SUCH"]))


ERRORS = [struct.error("s"), KeyError(1), IndexError(), ZeroDivisionError("z"), MemoryError(), RecursionError("r")]
ERRORS += [EOFError(), zlib.error("z"), NotImplementedError(), AttributeError("a"), TypeError("t"), OverflowError("o")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_a_decoder_raises_is_a_media_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise error

    data = encoded("PNG")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "verify", fail)
    for look in LOOKS:
        with pytest.raises(MediaError, match=f"the image cannot be read: .*{str(error) or type(error).__name__}"):
            look(data)


@pytest.mark.parametrize("look", LOOKS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_images_raise_one_error(look: Any, data: st.DataObject, started: list[Any]) -> None:
    content = bytearray(encoded(data.draw(st.sampled_from([*USUAL_FORMATS, "EPS", "ICO"]))))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 40))
        content[at : at + 1] = data.draw(st.binary(max_size=3))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    try:
        look(bytes(content[:cut]))
    except MediaError as error:
        assert str(error)
    assert not started


def test_sizes_have_limits(tmp_path: Path) -> None:
    wide = encoded("PNG", Image.new("1", (400, 300)))
    few = MediaConfig(max_pixels=119_999)
    for look in LOOKS:
        look(wide, media=MediaConfig(max_pixels=120_000))
        with pytest.raises(MediaError, match="400 x 300 pixels, and data.media.max_pixels=119999"):
            look(wide, media=few)
    path = tmp_path / "large.png"
    path.write_bytes(encoded("PNG") + bytes(1_000_000))
    address = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    for form in (path.read_bytes(), str(path), {"path": str(path)}, address):
        with pytest.raises(MediaError, match=r"has 1\d{6} bytes or more, and data.media.max_mb=1"):
            load_image(form, MediaConfig(max_mb=1))
        assert load_image(form, MediaConfig(max_mb=2)).size == PICTURE.size


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        for form in (str(path), f"file://{path}", {"image": str(path)}):
            for look in LOOKS:
                with pytest.raises(MediaError, match="is a (named pipe|device), not a file"):
                    look(form)
