"""Generated videos that others may send: damaged, with headers that lie, far too large, or no videos at all."""

import io
import math
import os
import random
import struct
import wave
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (64, 48)
SECRET = "secret.mp4"
FORMATS = {
    "mp4": "mpeg4", "avi": "mpeg4", "matroska": "mpeg4", "mpeg": "mpeg2video", "mpegts": "mpeg2video", "flv": "flv",
    "gif": "gif", "asf": "mpeg4", "m4v": "mpeg4",
}  # fmt: skip
TAGS = [
    b"mvhd", b"tkhd", b"mdhd", b"stts", b"stsz", b"stsc", b"stco", b"elst", b"stsd", b"mp4v", b"esds", b"hdlr", b"avih",
    b"strh", b"strf", b"idx1", b"movi", b"\x44\x89", b"\x2a\xd7\xb1", b"\x23\xe3\x83", b"\xb0\x82", b"\xba\x82",
    b"\x00\x00\x01\xb3", b"\x00\x00\x01\xba", b"\x00\x00\x01\x20", b"\x00\x00\x01\x00", b"onMetaData", b"GIF89a",
]  # fmt: skip
"""Names of fields that say how long, how large or how many, in the headers of these formats."""
EXTREMES = [0, 1, 2, 0x7FFF, 0xFFFF, 1 << 20, 10**7, 178_000_000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
PLAYLISTS = [
    "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
    "#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nconcat:{}|{}\n#EXT-X-ENDLIST\n",
    '#EXTM3U\n#EXT-X-MAP:URI="{}"\n#EXTINF:1,\nsubfile,,start,0,end,64,,:{}\n#EXT-X-ENDLIST\n',
    "ffconcat version 1.0\nfile {}\n",
    "file '{}'\nduration 1\n",
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    '<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>{}</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
    "[playlist]\nFile1={}\nNumberOfEntries=1\n",
    "DirectShowSource({})\n",
]
"""Files that name other files; the name takes the place of ``{}``."""
PROTOCOLS = [
    "concat:{0}|{0}", "file:{0}", "subfile,,start,0,end,9999,,:{0}", "async:{0}", "cache:{0}", "crypto:{0}",
    "concatf:{0}", "tee:{0}", "pipe:0", "fd:0", "data:video/mp4;base64,AAAA", "tcp://127.0.0.1:9", "udp://127.0.0.1:9",
    "rtmp://127.0.0.1/a", "rtsp://127.0.0.1/a", "hls+file:{0}", "lavfi:testsrc", "http://127.0.0.1:9/a.mp4",
    "https://[::1]/a.mp4", "ftp://127.0.0.1/a.mp4", "gopher://127.0.0.1/a", "unix:/tmp/a", "ipfs://a", "smb://a/b",
    "testsrc=size=9999x9999", "/dev/video0", ":0.0", "-", "", "\0", "http:{0}", "FILE://{0}", "file:///{0}/",
]  # fmt: skip


@dataclass(frozen=True)
class HostileVideo:
    """A row's entry for a video, whose ``{}`` is the folder of its files.

    Attributes: ``files`` by name, None for a named pipe; ``is_none`` whether nothing of it is a video.
    """

    entry: Any
    files: dict[str, bytes | None] = field(default_factory=dict)
    is_none: bool = False

    def written(self, folder: Path) -> Any:
        """Write the files and return the entry."""
        for name, content in {SECRET: video("mp4"), **self.files}.items():
            if content is None:
                os.mkfifo(folder / name)
            else:
                (folder / name).write_bytes(content)
        return _placed(self.entry, str(folder))


def _placed(entry: Any, folder: str) -> Any:
    if isinstance(entry, str):
        return entry.replace("{}", folder)
    if isinstance(entry, dict):
        return {name: _placed(each, folder) for name, each in entry.items()}
    return [_placed(each, folder) for each in entry] if isinstance(entry, list) else entry


@cache
def video(kind: str, count: int = 12) -> bytes:
    """Return a small video of a format."""
    import av

    shades = np.random.default_rng(0).integers(0, 255, (count, SIZE[1], SIZE[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(FORMATS[kind], rate=25)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "rgb8" if kind == "gif" else "yuv420p"
        for shade in shades:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def hostile_video(chance: random.Random) -> HostileVideo:
    """Return a video of one of the kinds below."""
    kind = chance.choice([_damaged, _lying, _lying, _huge, _many, _other, _named, _special, _wishes, _wishes])
    return kind(chance)


def _file(content: bytes, is_none: bool = False, name: str = "a.mp4", **wishes: Any) -> HostileVideo:
    return HostileVideo({"video": f"{{}}/{name}", **wishes}, {name: content}, is_none)


def _damaged(chance: random.Random) -> HostileVideo:
    """Cut a video short, or change bytes of it."""
    content = bytearray(video(chance.choice(list(FORMATS))))
    if chance.random() < 0.5:
        del content[chance.randint(0, len(content)) :]
    for _ in range(chance.choice([0, 1, 20, 500])):
        if content:
            content[chance.randrange(len(content))] = chance.randrange(256)
    return _file(bytes(content))


def _lying(chance: random.Random) -> HostileVideo:
    """Write extreme numbers behind the names of fields in headers."""
    content = bytearray(video(chance.choice(list(FORMATS))))
    places = [at + len(tag) for tag in TAGS for at in _places(content, tag)]
    for at in chance.sample(places, min(len(places), chance.randint(1, 3))):
        for _ in range(chance.randint(1, 4)):
            to = at + 2 * chance.randrange(24)
            width = chance.choice(["<I", ">I", "<H", ">H"])
            number = struct.pack(width, chance.choice(EXTREMES) % (1 << 8 * struct.calcsize(width)))
            content[to : to + len(number)] = number
    return _file(bytes(content))


def _places(content: bytearray, tag: bytes) -> list[int]:
    found = [content.find(tag)]
    while found[-1] >= 0:
        found.append(content.find(tag, found[-1] + 1))
    return found[:-1][:3]


def _huge(chance: random.Random) -> HostileVideo:
    """Return headers that promise frames of up to four billion pixels."""
    width, height = (chance.choice([16_383, 30_000, 65_535]) for _ in range(2))
    gif = b"GIF89a" + struct.pack("<HH", width, height) + b"\xf0\0\0\0\0\0\xff\xff\xff"
    ivf = b"DKIF" + struct.pack(
        "<HH4sHHIIII", 0, 32, chance.choice([b"VP80", b"VP90", b"AV01", b"MJPG"]), width, height, 25, 1, 9, 0
    )
    key = b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    ivf += (struct.pack("<IQ", len(key), 0) + key) * 9
    avi = bytearray(video("avi"))
    at = avi.index(b"strf") + 8
    avi[at + 4 : at + 12] = struct.pack("<II", width, height)
    mp4 = bytearray(video("mp4"))
    at = mp4.index(b"mp4v", mp4.index(b"stsd")) + 28
    mp4[at : at + 4] = struct.pack(">HH", width, height)
    image = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return _file(chance.choice([gif + image * 9 + b";", ivf, bytes(avi), bytes(mp4)]))


def _many(chance: random.Random) -> HostileVideo:
    """Return short files with very many frames, or with tables of very many."""
    side = chance.choice([1, 64, 2_000, 9_000])
    image = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    gif = b"GIF89a" + struct.pack("<HH", side, side) + b"\xf0\0\0\0\0\0\xff\xff\xff"
    mp4 = bytearray(video("mp4"))
    many = chance.choice([10**7, 178_000_000, 0xFFFFFFFF])
    size = mp4.index(b"stsz") + 8
    mp4[size : size + 8] = struct.pack(">II", chance.choice([0, 1]), many)
    chunks = mp4.index(b"stsc") + 8
    mp4[chunks + 8 : chunks + 12] = struct.pack(">I", many)
    times = mp4.index(b"stts") + 8
    mp4[times + 4 : times + 8] = struct.pack(">I", many)
    made = chance.choice([gif + image * chance.choice([2_000, 100_000]) + b";", bytes(mp4), video("m4v") * 100])
    return _file(made, **chance.choice([{}, {"nframes": 64}, {"fps": 1e9, "max_frames": 64}]))


def _other(chance: random.Random) -> HostileVideo:
    """Return a file that is no video: a playlist, a picture, sound, text."""
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.new("RGB", SIZE).save(picture, chance.choice(["PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM", "EPS"]))
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(bytes(9_000))
    named = chance.choice([SECRET, f"file:{SECRET}", f"{{}}/{SECRET}", "http://127.0.0.1:9/a.ts", "/etc/passwd"])
    lists = [text.replace("{}", named).encode() for text in PLAYLISTS]
    others = [picture.getvalue(), sound.getvalue(), b"%!PS\nshowpage\n", b"PK\3\4" + bytes(99), b"", b"\0" * 9_999]
    others += [b"1\n00:00:01,000 --> 00:00:02,000\na\n", b"<svg/>", b"RIFF" + bytes(40), b"[Script Info]\n"]
    name = chance.choice(["a.mp4", "a.m3u8", "a.ffconcat", "a.mpd", "a.sdp", "a.avs", "a%03d.mp4", "a.pls", "a.png"])
    return _file(chance.choice([chance.choice(lists), chance.choice(lists), chance.choice(others)]), True, name)


def _named(chance: random.Random) -> HostileVideo:
    """Name a video by a protocol of FFmpeg, or a place that is no file."""
    return HostileVideo({"video": chance.choice(PROTOCOLS).format(f"{{}}/{SECRET}")}, {}, True)


def _special(chance: random.Random) -> HostileVideo:
    """Name a pipe, a folder or a device."""
    name = chance.choice(["{}/pipe", "file://{}/pipe", "{}", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/tty"])
    return HostileVideo({"video": name}, {"pipe": None}, True)


def _wishes(chance: random.Random) -> HostileVideo:
    """Ask for impossible numbers of a good video, or give a list that holds no frames."""
    odd = [0, -1, 1, 10**9, 1e300, math.nan, math.inf, "4", "many", True, [], {}, b"4", [4], 0.5, 2**70]
    names = [
        "nframes", "fps", "min_frames", "max_frames", "resized_height", "resized_width", "min_pixels", "max_pixels",
        "total_pixels", "sample_fps", "raw_fps", "frames_indices", "total_num_frames", "video_start", "type",
    ]  # fmt: skip
    wishes = {name: chance.choice(odd) for name in chance.sample(names, chance.randint(1, 3))}
    file = io.BytesIO()
    Image.new("RGB", SIZE).save(file, "PNG")
    frame: Any = {"bytes": file.getvalue()}
    lists: list[Any] = [
        [frame] * 4, [frame] * 4, [frame] * 4, frame, 7, b"a", [None], [7], [[frame]], ["{}/pipe"], [{}], {}, 0.5, True,
        ["http://127.0.0.1:9/a.png"], ["tcp://127.0.0.1:9"], [b""], [frame, b"no image"], [frame, {"path": "{}"}],
    ]  # fmt: skip
    given = chance.choice([f"{{}}/{SECRET}", f"{{}}/{SECRET}", chance.choice(lists)])
    is_none = not isinstance(given, str) and given != [frame] * 4
    return HostileVideo({"video": given, **wishes}, {"pipe": None}, is_none)
