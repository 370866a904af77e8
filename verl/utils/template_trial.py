"""Render chats by a chat template that nobody has tried, in a process that imports jinja2 and no more.

``python -I template_trial.py SECONDS`` reads the template from standard input and writes one line of JSON for each chat
that it begins, and one for a problem that it finds. The kernel ends it after so many seconds of work; it cannot take
more than ``MEMORY_BYTES``. See ``chat_template.template_problem``.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from verl.utils.json_types import Json, JsonObject

MEMORY_BYTES = 2**30
LONGEST_TEXT = 2**20
"""The most characters of a text, whatever its chat."""
LONGEST_GROWTH = 100
"""The most characters of a longer text for each character of its chat."""
FAULT = "fault"
CHAT = "chat"

_LINE = "The quick brown fox jumps over the lazy dog. "
_TOOL: "JsonObject" = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def longest_text(chat_size: int) -> int:
    """Return the most characters that a template may make of a chat of so many."""
    return max(LONGEST_TEXT, LONGEST_GROWTH * chat_size)


def main(seconds: float) -> None:
    """Read a template from standard input, and render test chats with it."""
    template = sys.stdin.buffer.read().decode("utf-8", "replace")
    with suppress(ValueError, OSError):  # not every system has such a limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process
    try:
        _try(template)
    except MemoryError:
        _write(FAULT, f"takes more than {MEMORY_BYTES >> 20} MB of memory")
    except RecursionError:
        _write(FAULT, "recurses without end")


def _try(template: str) -> None:
    environment = _environment()
    try:
        environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error):  # the model's processor may define such tags
            _write(FAULT, f"is not valid Jinja, line {error.lineno}: {error.message}")
        return
    for name, chat in _chats():
        _write(CHAT, name)
        _render(environment, template, chat)


def _chats() -> "Iterator[tuple[str, JsonObject]]":
    yield "a chat of one message", {"messages": [{"role": "user", "content": "1 + 1 = ?"}]}
    talk = [{"role": role, "content": _LINE * 100} for role in ("user", "assistant", "user")]
    yield "a chat of three messages", {"messages": talk}
    yield "a chat of three messages and a tool", {"messages": talk, "tools": [_TOOL]}


def _render(environment: jinja2.Environment, template: str, chat: "JsonObject") -> None:
    """Render a chat; an error that the template raises is no problem, since it may refuse the chat."""
    longest = longest_text(len(json.dumps(chat)))
    size = 0
    try:
        for part in environment.from_string(template).generate(**chat, add_generation_prompt=True):
            size += len(part)
            if size > longest:
                _write(FAULT, f"writes more than {longest} characters")
                raise SystemExit
    except (MemoryError, RecursionError):
        raise
    except Exception:  # a template that raises refuses the chat
        return


def _environment() -> jinja2.Environment:
    """Return an environment with the options of transformers' own."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: "2026-01-01"
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag around an assistant's content, which changes no text."""

    tags = {"generation"}

    def parse(self, parser: "Parser") -> "list[Node]":
        """Return the content between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_json(value: "Json", ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _write(kind: str, text: str) -> None:
    sys.stdout.write(f"{json.dumps([kind, text])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
