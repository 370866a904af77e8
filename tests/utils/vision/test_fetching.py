"""Addresses of images and videos: which may be fetched, by whom, and for how long."""

import io
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from verl.utils.dataset import vision_utils
from verl.utils.dataset.vision_utils import MediaError, check_image, check_video, load_image, load_video, process_image
from verl.utils.vision import fetching
from verl.utils.vision.fetching import addresses_in, fetch, is_public, scheme_of
from verl.utils.vision.limits import MediaConfig

ANY = MediaConfig(any_address=True)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    return buffer.getvalue()


class Site:
    """A server on all loopback addresses, and the paths that it was asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.answer: Callable[[Any], None] = lambda handler: None
        self.port = 0


@contextmanager
def serving() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.paths.append(f"{self.headers['Host'].partition(':')[0]}{self.path}")
            if self.path == "/a.png":
                self.reply(200, png())
            else:
                site.answer(self)

        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    server.daemon_threads = True
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with serving() as site:
        yield site


@pytest.fixture
def site(served: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    served.paths.clear()
    return served


HOSTS = ["127.0.0.1", "localhost", "localhost.", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "0.0.0.0"]
HOSTS += ["[::1]", "[::ffff:127.0.0.1]", "127.0.0.%31", "%31%32%37.0.0.1", "a@127.0.0.1", "a:b@127.0.0.1", "LOCALHOST"]
HOSTS += ["127.0.0.2", "①②⑦.0.0.1"]


@pytest.mark.parametrize("host", HOSTS)
def test_no_spelling_of_a_private_address_is_fetched(host: str, site: Site) -> None:
    for scheme in ("http", "HTTP", "https"):
        with pytest.raises(MediaError, match="cannot be fetched"):
            load_image(f"{scheme}://{host}:{site.port}/a.png")
    assert not site.paths


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "[fe80::1]",
        "[fc00::1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    ],
)
def test_addresses_of_a_network_are_refused_without_a_connection(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(MediaError, match=r"no public address: data\.media\.any_address=true allows it"):
        fetch(f"http://{host}/a.png", MediaConfig())


def test_the_key_allows_private_addresses(site: Site) -> None:
    assert load_image(f"http://127.0.0.1:{site.port}/a.png", ANY).size == (30, 20)
    assert site.paths == ["127.0.0.1/a.png"]


@pytest.fixture
def is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 127.0.0.1 stand for a public address, and the rest of the network for private ones."""
    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_checked_too(status: int, site: Site, is_near: None) -> None:
    site.answer = lambda handler: handler.reply(status, Location=f"http://127.0.0.2:{site.port}/a.png")
    with pytest.raises(MediaError, match=r"127\.0\.0\.2, which is no public address"):
        fetch(f"http://127.0.0.1:{site.port}/moved", MediaConfig())
    assert site.paths == ["127.0.0.1/moved"]
    site.answer = lambda handler: handler.reply(status, Location="/a.png")
    assert fetch(f"http://127.0.0.1:{site.port}/moved", MediaConfig()) == png()


@pytest.mark.parametrize(
    "target",
    ["file:///etc/hostname", "ftp://127.0.0.1/a", "data:,a", "gopher://a", "//", "http://[", "http://127.0.0.1:99999/"],
)
def test_redirects_lead_to_web_addresses_only(target: str, site: Site, is_near: None) -> None:
    site.answer = lambda handler: handler.reply(302, Location=target)
    with pytest.raises(MediaError, match="cannot be fetched"):
        fetch(f"http://127.0.0.1:{site.port}/moved", MediaConfig())


def test_redirects_without_end_end(site: Site, is_near: None) -> None:
    site.answer = lambda handler: handler.reply(302, Location=f"/moved{len(site.paths)}")
    with pytest.raises(MediaError, match="cannot be fetched"):
        fetch(f"http://127.0.0.1:{site.port}/moved", MediaConfig())
    assert len(site.paths) < 20


def test_a_name_with_one_private_address_is_refused(site: Site, is_near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(host: str, port: int, **options: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("127.0.0.1", port)), (*kind, ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    with pytest.raises(MediaError, match=r"images\.test is 10\.0\.0\.1, which is no public address"):
        fetch(f"http://images.test:{site.port}/a.png", MediaConfig())
    assert not site.paths


def test_an_address_is_looked_up_once(site: Site, is_near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when it is checked, and private when it is connected to, is connected to as checked."""
    answers = iter(["127.0.0.1", "10.0.0.1"])
    real = socket.getaddrinfo

    def named(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        return real(next(answers) if host == "images.test" else host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    assert fetch(f"http://images.test:{site.port}/a.png", MediaConfig()) == png()


@pytest.mark.parametrize("early", [True, False])
def test_a_server_that_drips_is_left(early: bool, site: Site) -> None:
    gone = threading.Event()

    def drip(handler: Any) -> None:
        if not early:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while not gone.wait(0.02):
                handler.wfile.write(b"a")
                handler.wfile.flush()
        except OSError:
            pass

    site.answer = drip
    with pytest.raises(MediaError, match=r"it takes longer than data\.media\.max_s=0\.5"):
        fetch(f"http://127.0.0.1:{site.port}/drip", MediaConfig(any_address=True, max_s=0.5))
    gone.set()


def test_a_large_file_is_not_read_to_its_end(site: Site) -> None:
    def endless(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                handler.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    site.answer = endless
    with pytest.raises(MediaError, match=r"more bytes than data\.media\.max_mb=1 allows"):
        fetch(f"http://127.0.0.1:{site.port}/endless", MediaConfig(any_address=True, max_mb=1))


SCHEMES = ["tcp", "udp", "rtmp", "rtsp", "ftp", "unix", "gopher", "crypto", "subfile", "concatf", "pipe", "ipfs", "s3"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_schemes_are_refused(scheme: str) -> None:
    address = f"{scheme}://127.0.0.1/a"
    with pytest.raises(MediaError, match="must begin with https:// or http://"):
        load_image(address, ANY)
    with pytest.raises(MediaError, match="write a path, or an address with https://"):
        check_video({"video": address}, ANY)


INNER = st.sampled_from(
    ["127.0.0.1", "10.1.2.3", "192.168.0.9", "169.254.169.254", "172.20.0.1", "0.0.0.0", "100.64.3.4"]
)


@settings(max_examples=200, deadline=None)
@given(
    inner=INNER | st.integers(0, 255).map(lambda last: f"10.0.{last}.{255 - last}"), low=st.integers(0, (1 << 64) - 1)
)
def test_no_generated_form_of_a_private_address_is_public(inner: str, low: int) -> None:
    number = int(ipaddress.IPv4Address(inner))
    mapped, nat64, six = ((0xFFFF << 32) | number, (0x64FF9B << 96) | number, (0x2002 << 112) | (number << 80) | low)
    teredo = (0x20010000 << 96) | (number ^ 0xFFFFFFFF)
    for form in (number, mapped, nat64, six, teredo):
        address = ipaddress.ip_address(form) if form <= 0xFFFFFFFF else ipaddress.IPv6Address(form)
        assert not is_public(address), address
    assert not is_public(ipaddress.IPv6Address(number))


def test_public_addresses_are_public() -> None:
    for text in ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(text))


def test_addresses_that_a_tool_names_are_found() -> None:
    for value in ("https://a/b", {"image": "http://a"}, {"video": ["x", {"url": "HTTP://a"}]}, [("tcp://a",)]):
        assert len(list(addresses_in(value))) == 1
    for value in ("a.png", "data:image/png;base64,AA", "file:///a.png", b"http://a", {"image": Image.new("L", (1, 1))}):
        assert not list(addresses_in(value))
    assert [scheme_of(each) for each in ("/a", "file:///a", "HTTPS://a", "a:b")] == [None, None, "https", None]


# ---- videos


def write_video(path: Path, count: int, codec: str, rate: int, seed: int) -> None:
    av = pytest.importorskip("av")
    rng = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(count):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def all_frames(path: Path) -> list[Image.Image]:
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        return [frame.to_image() for frame in container.decode(container.streams.video[0])]


VIDEOS = [
    (kind, codec, count, rate)
    for kind, codec in (("mp4", "mpeg4"), ("avi", "mpeg4"), ("mkv", "mpeg4"), ("mpg", "mpeg2video"))
    for count, rate in ((4, 25), (9, 8), (30, 10), (61, 24), (100, 5))
]


@pytest.mark.parametrize(("kind", "codec", "count", "rate"), [*VIDEOS, ("wrong.avi", "mpeg4", 30, 10)])
def test_frames_are_those_of_the_whole_video(kind: str, codec: str, count: int, rate: int, tmp_path: Path) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    if codec == "mpeg2video" and rate not in (24, 25):
        rate = 25
    path = tmp_path / f"a.{kind}"
    write_video(path, count, codec, rate, seed=count)
    if kind == "wrong.avi":  # the header says that there are 7 frames
        content = bytearray(path.read_bytes())
        at = content.index(b"avih") + 8 + 16
        content[at : at + 4] = (7).to_bytes(4, "little")
        path.write_bytes(content)
    whole = all_frames(path)
    for spec in ({"nframes": 4}, {"fps": 2.0}, {"fps": 2.0, "max_frames": 6}):
        read = vision_utils._read_file({"video": str(path), **spec}, MediaConfig())
        wanted = np.linspace(0, len(whole) - 1, len(read["video"])).round().astype(int).tolist()
        assert (read["frames_indices"], read["total_num_frames"]) == (wanted, len(whole))
        assert [image.tobytes() for image in read["video"]] == [whole[at].tobytes() for at in wanted]


def test_only_wanted_frames_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    write_video(tmp_path / "a.mp4", 50, "mpeg4", 10, seed=0)
    made = []

    class Counted:
        width, height = 64, 48

        def __init__(self, frame: Any) -> None:
            self.frame = frame

        def to_image(self) -> Image.Image:
            made.append(self.frame)
            return self.frame.to_image()

    real = vision_utils._decoded_frames
    monkeypatch.setattr(vision_utils, "_decoded_frames", lambda *args: ((s, Counted(f)) for s, f in real(*args)))
    load_video({"video": str(tmp_path / "a.mp4"), "nframes": 4})
    assert len(made) == 4


LISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n",
    "a.ffconcat": "ffconcat version 1.0\nfile secret.mp4\n",
    "b.mp4": "ffconcat version 1.0\nfile secret.mp4\n",
    "c.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
    "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_other_files_are_no_videos(name: str, tmp_path: Path) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    write_video(tmp_path / "secret.mp4", 8, "mpeg4", 10, seed=0)
    (tmp_path / name).write_text(LISTS[name])
    with pytest.raises(MediaError, match="cannot be read"):
        load_video({"video": str(tmp_path / name)})


def test_files_that_are_no_videos_are_seen_at_load(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(MediaError, match="pipe.mp4 is a named pipe, not a file"):
        check_video({"video": str(tmp_path / "pipe.mp4")})
    (tmp_path / "large.mp4").write_bytes(bytes(1_000_001))
    with pytest.raises(MediaError, match=r"has 1000001 bytes or more, and data\.media\.max_mb=1"):
        check_video({"video": f"file://{tmp_path}/large.mp4"}, MediaConfig(max_mb=1))
    check_video({"video": str(tmp_path / "large.mp4")})
    with pytest.raises(MediaError, match="no such file"):
        check_video({"video": "concat:a.mp4|b.mp4"})


@pytest.mark.parametrize(
    "name", ["nframes", "fps", "min_frames", "max_frames", "sample_fps", "max_pixels", "total_pixels"]
)
@pytest.mark.parametrize("wish", ["many", -1, float("nan"), float("inf"), 2**70, [4], True])
def test_wishes_for_a_video_are_numbers(name: str, wish: Any) -> None:
    for source in ("no/such.mp4", [Image.new("RGB", (56, 56))] * 4):
        with pytest.raises(MediaError, match=rf"^{name} of a video must be a number from 0 to 1e\+12, got "):
            load_video({"video": source, name: wish})


@pytest.mark.parametrize("source", [7, True, b"a.mp4", {"path": "a.mp4"}, None])
def test_a_video_is_a_path_or_a_list(source: Any) -> None:
    for read in (load_video, check_video):
        with pytest.raises(MediaError, match="a video must be a dict such as"):
            read({"video": source})


def test_frames_that_are_taken_have_a_limit_together(tmp_path: Path) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    write_video(tmp_path / "a.mp4", 24, "mpeg4", 10, seed=0)
    path = str(tmp_path / "a.mp4")
    few = MediaConfig(max_pixels=64 * 56)
    square = {"resized_height": 28, "resized_width": 28}
    assert len(load_video({"video": path, "nframes": 16, **square}, media=few)[0]) == 16
    frames = [Image.new("RGB", (64, 48))] * 19
    for wanted in ({"video": path, "nframes": 20}, {"video": frames}):
        with pytest.raises(MediaError, match=r"have \d+ pixels, and 16 \* data\.media\.max_pixels=57344: take fewer"):
            load_video({**wanted, **square}, media=few)
    large = {"min_pixels": 99_000_000, "max_pixels": 99_900_000}
    with pytest.raises(MediaError, match=r"have 18\d{8} pixels, and 16 \* data\.media\.max_pixels=1600000000"):
        load_video({"video": frames, **large})
    huge = {"min_pixels": 10**9, "max_pixels": 10**9}
    for read in (check_image, process_image):
        with pytest.raises(MediaError, match=r"pixels, and data\.media\.max_pixels=100000000"):
            read({"image": frames[0], **huge})


def test_a_video_that_takes_long_is_left(tmp_path: Path) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    write_video(tmp_path / "a.mp4", 8, "mpeg4", 10, seed=0)
    with pytest.raises(MediaError, match=r"takes longer to decode than data\.media\.max_s=1e-09"):
        load_video({"video": str(tmp_path / "a.mp4")}, media=MediaConfig(max_s=1e-9))


def test_a_video_has_the_limits_of_images(tmp_path: Path, site: Site) -> None:
    pytest.importorskip("qwen_vl_utils.vision_process")
    write_video(tmp_path / "a.mp4", 8, "mpeg4", 10, seed=0)
    path = str(tmp_path / "a.mp4")
    with pytest.raises(MediaError, match=r"64 x 48 pixels, and data\.media\.max_pixels=3071"):
        load_video({"video": path}, media=MediaConfig(max_pixels=3071))
    content = (tmp_path / "a.mp4").read_bytes()
    site.answer = lambda handler: handler.reply(200, content)
    address = f"http://127.0.0.1:{site.port}/a.mp4"
    with pytest.raises(MediaError, match="no public address"):
        load_video({"video": address})
    fetched, read = load_video({"video": address}, media=ANY), load_video({"video": path})
    assert (fetched[0] == read[0]).all() and fetched[1] == read[1]
