"""Generated inputs of each kind that others may send: none runs code, hangs, or is accepted wrongly.

The page on security has a row for each kind, and says what the same inputs did before there were limits.
"""

import io
import json
import random
import re
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from examples.tiny_model import byte_tokenizer
from tests.utils.vision.hostile_videos import HostileVideo, hostile_video
from verl.errors import CheckpointError
from verl.experimental.agent_loop.endpoint.requests import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    RequestError,
    parse_body,
    parse_chat,
    parse_completion,
)
from verl.tools.retrieval_index import BM25Index, Document
from verl.tools.retrieval_server import MOST_ANSWER_BYTES, RequestRefused, Retriever
from verl.tools.search_tool import RetrievalError, _documents
from verl.utils.chat import Appended, ChatFormat
from verl.utils.chat_template import template_problem
from verl.utils.checkpoint.torch_dist import _checked_places
from verl.utils.dataset.vision_utils import check_video, load_video, process_image
from verl.utils.masking import masked, masked_text
from verl.utils.parsing import parse_yaml
from verl.utils.process.time_limit import time_limit
from verl.utils.vision.fetching import fetch
from verl.utils.vision.images import MediaError
from verl.utils.vision.limits import USUAL_FORMATS, MediaConfig

PAGE = Path(__file__).parents[2] / "docs/security.md"
FEW, MANY = 5, 200
HANG_S = 60.0
"""Seconds after which an input counts as one that hangs."""
WORDS = ["news", "1 < 2", "a\n\n", " ", "é 五 🙂", "<b>", "|>", "{{ x }}", "\\", '"']


@dataclass(frozen=True)
class Kind:
    """Inputs of a kind: ``make`` gives one, and ``is_held`` says whether it is answered well."""

    make: Callable[[random.Random], Any]
    is_held: Callable[[Any], bool]


def _refused(call: Callable[[], Any], *errors: type[Exception]) -> bool:
    try:
        call()
    except errors:
        return True
    return False


# ---- texts of tools and users

_TOKENIZER = byte_tokenizer()
_CHAT = ChatFormat(_TOKENIZER)
_CONTROL = {*_TOKENIZER.all_special_ids}


def _text_of_a_tool(chance: random.Random) -> str:
    control = _TOKENIZER.all_special_tokens
    parts = [chance.choice([*control, *control, *WORDS]) for _ in range(chance.randint(1, 12))]
    cut = chance.choice(control)
    return "".join([*parts, cut[: chance.randint(1, len(cut))], chance.choice(control)])


def _has_no_more_control_tokens(text: str) -> bool:
    def count(said: str) -> int:
        message = _CHAT.control.of_others({"role": "user", "content": said})
        grown = _CHAT.after_turn(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [message], stopped=False
        )
        assert isinstance(grown, Appended)
        return sum(token in _CONTROL for token in grown.token_ids)

    return count(text) == count("a")


# ---- chat templates


def _bomb(chance: random.Random) -> str:
    text = "".join(chance.choices("abcdefg", k=chance.randint(8, 40)))
    many = chance.randint(10**8, 10**10)
    body = chance.choice(
        [
            "{% set all = namespace(t='" + text + "') %}" + "{% set all.t = all.t ~ all.t %}" * chance.randint(30, 40),
            "{% set all = namespace(t=['"
            + text
            + "']) %}"
            + "{% set all.t = all.t + all.t %}" * chance.randint(30, 40),
            f"{{{{ '{text}' * {many} }}}}",
            f"{{{{ '{text}' | center({many}) }}}}",
            f"{{{{ messages | tojson | replace('e', '{text}' * {10**6}) }}}}",
            f"{{% for a in range({chance.randint(99_000, 100_000)}) %}}" * 3 + "{% endfor %}" * 3,
            f"{{{{ {chance.randint(7, 9)} ** ({chance.randint(7, 9)} ** {chance.randint(11, 12)}) }}}}",
            "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
            "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
            "{{ " + "(" * chance.randint(3_000, 9_000) + "1" + ")" * 9_000 + " }}",
            f"{{% for a in '{text}' * {10**6} %}}{{% for b in '{text}' * {10**6} %}}{{% endfor %}}{{% endfor %}}",
            f"{{{{ lipsum({many}) }}}}",
        ]
    )
    condition = chance.choice(["true", "messages", "tools", "messages | length == 3", "add_generation_prompt"])
    return f"{{{{ messages[0].content }}}}{{% if {condition} %}}{body}{{% endif %}}"


# ---- images


def _image(chance: random.Random) -> bytes:
    """Return PostScript, an image of a format that nobody allowed, or a damaged one."""
    kind = chance.choice(["postscript", "other", "damaged"])
    if kind == "postscript":
        start = chance.choice(
            [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"%!PS\n", b"\xc5\xd0\xd3\xc6" + b"\0" * 28 + b"%!PS-Adobe-3.0\n"]
        )
        size = b"%%%%BoundingBox: 0 0 %d %d\n%%%%EndComments\n" % (chance.randint(1, 99), chance.randint(1, 99))
        return start + size + b"(a) run showpage\n" * chance.randint(1, 9)
    file = io.BytesIO()
    format_ = chance.choice(
        ["PCX", "SGI", "TGA", "ICO", "IM", "MSP", "EPS", "PDF", "DDS"]
        if kind == "other"
        else ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]
    )
    Image.new("1" if format_ == "MSP" else "RGB", (chance.randint(1, 64), chance.randint(1, 64))).save(file, format_)
    content = bytearray(file.getvalue())
    if kind == "damaged":
        for _ in range(chance.randint(1, 20)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        del content[chance.randint(1, len(content)) :]
    return bytes(content)


def _is_read_or_refused(content: bytes) -> bool:
    try:
        image = process_image({"bytes": content})
    except MediaError:
        return True
    with Image.open(io.BytesIO(content)) as opened:
        return opened.format in USUAL_FORMATS and image.mode == "RGB"


# ---- videos


def _is_decoded_or_refused(video: HostileVideo) -> bool:
    pytest.importorskip("av")
    pytest.importorskip("qwen_vl_utils.vision_process")
    with tempfile.TemporaryDirectory() as folder:
        entry = video.written(Path(folder))
        _refused(lambda: check_video(entry), MediaError)
        try:
            frames, metadata = load_video(entry, media=MediaConfig(max_s=5.0))
        except MediaError:
            return True
    return not video.is_none and len(frames) == len(metadata["frames_indices"])


# ---- addresses of rows


def _private_address(chance: random.Random) -> str:
    a, b, c = (chance.randrange(256) for _ in range(3))
    host = chance.choice(
        [
            f"127.{a}.{b}.{c}", f"10.{a}.{b}.{c}", f"192.168.{a}.{b}", f"172.{chance.randint(16, 31)}.{a}.{b}",
            f"169.254.{a}.{b}", f"100.{chance.randint(64, 127)}.{a}.{b}", "0.0.0.0", "localhost", "LOCALHOST", "127.1",
            str((127 << 24) + (a << 16) + (b << 8) + c), hex((10 << 24) + (a << 16) + c), f"0177.0.{b}.{c}", "[::1]",
            f"[::ffff:127.{a}.{b}.{c}]", f"[fe80::{a:x}]", f"[fd{a:02x}::{b:x}]", f"[64:ff9b::7f00:{c:x}]", "[::]",
            f"[2002:7f00:{b:x}::1]", f"[::7f00:{c:x}]",
        ]
    )  # fmt: skip
    scheme = chance.choice(["http", "https", "HTTP"])
    other = chance.choice(["tcp", "ftp", "gopher", "rtsp", "data", "concat", "unix"])
    user = chance.choice(["", "", "me:secret@", "1.1.1.1@"])
    path = chance.choice(["/a.png", "", "/latest/meta-data", "?url=https://1.1.1.1"])
    return f"{chance.choice([scheme] * 4 + [other])}://{user}{host}:{chance.randint(1, 65_535)}{path}"


# ---- requests to the endpoint


def _value(chance: random.Random, depth: int = 0) -> Any:
    kinds = [None, True, -1, 2**70, 1e400, "", "a", "\ud800", "x" * 300, [], {}]
    if depth < 4 and chance.random() < 0.4:
        inner = [_value(chance, depth + 1) for _ in range(chance.randint(0, 3))]
        return (
            inner
            if chance.random() < 0.5
            else {chance.choice(["role", "content", "type", "a"]): each for each in inner}
        )
    return chance.choice(kinds)


_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def _request(chance: random.Random) -> bytes:
    """Return a request with a few wrong fields, too many entries, or bytes that are no JSON."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    names = [
        "messages",
        "prompt",
        "tools",
        "stop",
        "temperature",
        "n",
        "logprobs",
        "stream_options",
        "tool_choice",
        "max_tokens",
    ]
    for name in chance.sample(names, chance.randint(1, 3)):
        body[name] = _value(chance)
    entries = {"messages": {"role": "user", "content": "a"}, "tools": _TOOL, "stop": "a"}
    many = chance.choice([*entries, None])
    if many is not None:
        body = {"messages": [entries["messages"]], "prompt": "a"}
        body[many] = [entries[many]] * chance.choice([MOST_STOPS + 1, MOST_TOOLS + 1, MOST_MESSAGES + 1])
    written = json.dumps(body).encode()
    if chance.random() < 0.2:
        return written[: chance.randrange(len(written))] + bytes(chance.randrange(256) for _ in range(3))
    return b"[" * 100_000 + written if chance.random() < 0.1 else written


def _is_parsed_or_refused(body: bytes) -> bool:
    for parse in (parse_chat, parse_completion):
        try:
            asked = parse(parse_body(body))
        except RequestError:
            continue
        if len(asked.options.stop) > MOST_STOPS:
            return False
        if hasattr(asked, "messages") and (len(asked.messages) > MOST_MESSAGES or len(asked.tools) > MOST_TOOLS):
            return False
    return True


# ---- searches, replies, files


_RETRIEVER = Retriever(
    [Document(str(at), "a town " * 20_000) for at in range(50)], BM25Index([Document("1", "a town")] * 50), 3
)


def _search(chance: random.Random) -> bytes:
    queries: Any = ["a town"] * chance.choice([1, 40, 1_000, 2_000])
    asked = {
        "queries": chance.choice([queries, queries, _value(chance)]),
        "topk": chance.choice([1, 16, 50, 10**9, _value(chance)]),
    }
    written = json.dumps(asked).encode()
    return chance.choice([written, written, written[: len(written) // 2], b'{"queries":' * 100_000])


def _answer_is_short(body: bytes) -> bool:
    try:
        return len(_RETRIEVER.answer(body)) <= 2 * MOST_ANSWER_BYTES
    except RequestRefused:
        return True


def _reply(chance: random.Random) -> str:
    depth = chance.choice([1, 5, 100_000])
    start = chance.choice(["[", '{"result":', '{"result": [[', '{"a":'])
    whole = json.dumps({"result": _value(chance)})
    return chance.choice(
        [whole, start * depth, f'{{"result": {_value(chance)!r}}}', "", "\x00", "NaN", '{"result": [[]]}']
    )


def _is_result_or_error(text: str) -> bool:
    try:
        found = _documents("http://127.0.0.1", text, 1)
    except RetrievalError:
        return True
    return len(found) == 1 and isinstance(found[0], list)


def _yaml(chance: random.Random) -> str:
    wide, deep = chance.randint(5, 20), chance.randint(7, 30)
    lines = ["a0: &a0 [" + ", ".join(["x"] * wide) + "]"]
    lines += [f"a{at}: &a{at} [" + ", ".join([f"*a{at - 1}"] * wide) + "]" for at in range(1, deep)]
    return chance.choice(
        [
            "\n".join(lines), "[" * chance.randint(2_000, 50_000), "a: &a [*a]", "{" * 3_000, "- " * 5_000,
            "!!int ''", "!!float ''", "!!timestamp x", "!!python/object/apply:os.system ['true']",
            "!!python/name:os.system", "a: &a {b: *a}", "a: [\x00]",
        ]
    )  # fmt: skip


def _index(chance: random.Random) -> Metadata:
    """Return the index of a checkpoint that places a part where it may not be."""
    folder = chance.choice(["sub/", "../", "/tmp/", "./", "a/../", "//", "sub//", "../" * chance.randint(2, 9), "~/"])
    path: Any = chance.choice([folder + "__0_0.distcp", folder, "..", ".", "", None, 7, b"__0_0.distcp"])
    transforms = None
    if chance.random() < 0.3:
        path, transforms = "__0_0.distcp", [chance.choice(["zstd", "gzip", 7])]
    place = _StorageInfo(path, chance.choice([0, 5]), 10, transforms)
    return Metadata({}, storage_data={MetadataIndex(f"part{chance.randint(0, 9)}"): place})


# ---- secrets


def _secret(chance: random.Random) -> tuple[str, str, str]:
    word = chance.choice(["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH"])
    name = chance.choice(["MY_{}", "{}_FILE", "WANDB_API_{}", "A{}B", "my_{}_2"]).format(word)
    value = "".join(chance.choices("abcXYZ019 .:/+=-_@#$%&*()[]{}'\"ß", k=chance.randint(8, 40))).strip() + "end"
    text = chance.choice(["{}", "Bearer {}", "https://host/?q={}", "X={}", "failed: {} (401)", '{{"a": "{}"}}'])
    return name, value, text.replace("{}", value).replace("{{", "{").replace("}}", "}")


def _is_hidden(secret: tuple[str, str, str]) -> bool:
    name, value, text = secret
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        shown = [masked_text(text), str(masked({"a": {"b": [text]}, "c": value}))]
    return not any(value in each for each in shown)


KINDS = {
    "texts of tools and users": Kind(_text_of_a_tool, _has_no_more_control_tokens),
    "chat templates": Kind(_bomb, lambda template: template_problem(template, 0.5) is not None),
    "images": Kind(_image, _is_read_or_refused),
    "videos": Kind(hostile_video, _is_decoded_or_refused),
    "addresses in rows": Kind(
        _private_address, lambda url: _refused(lambda: fetch(url, MediaConfig(max_s=1.0)), MediaError)
    ),
    "requests to the endpoint": Kind(_request, _is_parsed_or_refused),
    "searches": Kind(_search, _answer_is_short),
    "replies of services": Kind(_reply, _is_result_or_error),
    "YAML": Kind(_yaml, lambda text: _refused(lambda: parse_yaml(text), ValueError)),
    "indices of checkpoints": Kind(
        _index, lambda index: _refused(lambda: _checked_places(Path(".metadata"), index), CheckpointError)
    ),
    "secrets": Kind(_secret, _is_hidden),
}


class RanCode(BaseException):
    """An input started a process or opened a connection."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_generated_inputs_are_held(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*args: Any, **options: Any) -> None:
        raise RanCode(args)

    if name != "chat templates":  # which are tried in a process of ours
        monkeypatch.setattr(subprocess.Popen, "__init__", ran)
    monkeypatch.setattr(socket.socket, "connect", ran)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    chance, kind = random.Random(f"{name} {count}"), KINDS[name]
    for number in range(count):
        made = kind.make(chance)
        with time_limit(HANG_S):
            assert kind.is_held(made), (number, str(made)[:2_000])


def test_the_page_has_each_kind() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| 0 \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(name, str(MANY)) for name in KINDS]
