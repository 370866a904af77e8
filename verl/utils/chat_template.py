"""Chat templates, which are programs: rendering within a time limit, and a trial in a process before a run starts."""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import jinja2

from verl.base_config import as_yaml
from verl.errors import WrongInput
from verl.utils import template_trial
from verl.utils.json_types import Json
from verl.utils.process.lifetime import start_process
from verl.utils.process.pool import START_TIMEOUT_S
from verl.utils.process.time_limit import TimeLimitExceeded, time_limit

RENDER_TIMEOUT_S = 60.0
TRIAL_TIMEOUT_S = 10.0
_SHOWN_CHARS = 200
_in_thread = threading.local()

logger = logging.getLogger(__name__)


class ChatTemplateTimeout(jinja2.TemplateError):
    """A chat template does not end."""


class ChatTemplateOutput(jinja2.TemplateError):
    """A chat template renders far more text than the chat has."""


class HasChatTemplate(Protocol):
    """A tokenizer or a processor."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a conversation as text or tokens."""


def render_chat(templater: HasChatTemplate, messages: Sequence[Mapping[str, Json]], options: Mapping[str, Json]) -> str:
    """Return the text of a chat; ``options`` go to ``apply_chat_template``.

    Raises: ChatTemplateTimeout after ``RENDER_TIMEOUT_S``; ChatTemplateOutput for a text that is far longer than the
        chat; and the errors of the template.
    """
    try:
        with nullcontext() if getattr(_in_thread, "shares_limit", False) else time_limit(RENDER_TIMEOUT_S):
            text: str = templater.apply_chat_template(messages, **options)
    except TimeLimitExceeded as error:
        shown = repr(messages)[:_SHOWN_CHARS]
        raise ChatTemplateTimeout(f"it did not end within {RENDER_TIMEOUT_S:g} s for {shown}") from error
    except RecursionError as error:
        raise jinja2.TemplateError("it recurses without end") from error
    if len(text) > template_trial.LONGEST_TEXT:
        longest = template_trial.longest_text(len(repr((messages, options))))
        if len(text) > longest:
            raise ChatTemplateOutput(f"it writes {len(text)} characters for a chat that may give {longest}")
    return text


def check_awaits_turn(messages: Sequence[Mapping[str, Json]]) -> None:
    """Reject a chat that a generation prompt is to follow, if its last message is an assistant's.

    Raises: WrongInput.
    """
    if len(messages) and messages[-1].get("role") == "assistant":
        raise WrongInput(
            "the chat ends with an assistant's message, after which the answer would be a second turn of the "
            "assistant: end it with a message of another role"
        )


@contextmanager
def shared_time_limit() -> Iterator[None]:
    """Let all calls of ``render_chat`` in the block share one time limit of ``RENDER_TIMEOUT_S``, which costs less.

    Raises: ChatTemplateTimeout for the whole block; render again without it to learn which chat takes the time.
    """
    try:
        with time_limit(RENDER_TIMEOUT_S):
            _in_thread.shares_limit = True
            yield
    except TimeLimitExceeded as error:
        raise ChatTemplateTimeout(f"many chats did not end within {RENDER_TIMEOUT_S:g} s") from error
    finally:
        _in_thread.shares_limit = False


@lru_cache(maxsize=64)
def template_problem(template: str, timeout_s: float = TRIAL_TIMEOUT_S) -> str | None:
    """Return why a template is invalid Jinja, or takes too much time, memory or text for a chat; None if it is fine.

    A child process renders a chat of one message and one of three, without and with a tool. A template may refuse any
    of these chats.
    """
    command = [sys.executable, "-I", template_trial.__file__, str(timeout_s)]
    process = start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        try:
            output, _ = process.communicate(template.encode("utf-8", "replace"), START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"does not end within {START_TIMEOUT_S:g} s"
        finally:  # a time limit or Ctrl-C too
            process.kill()
    lines = [json.loads(line) for line in output.splitlines()]
    faults = [text for kind, text in lines if kind == template_trial.FAULT]
    chats = [text for kind, text in lines if kind == template_trial.CHAT]
    place = f" for {chats[-1]}" if chats else ""
    if faults:
        return f"{faults[0]}{place}"
    if process.returncode == -signal.SIGPROF:
        return f"does not end within {timeout_s:g} s{place}"
    return f"has killed its process (exit code {process.returncode}){place}" if process.returncode else None


DEFAULT = "default"
USED_NAMES = (DEFAULT, "tool_use")
"""Templates of a tokenizer with several that transformers takes by itself: without and with tools."""


Templates: TypeAlias = str | Mapping[str, str] | None
"""The chat template of a tokenizer, several by their names, or none."""


def used_templates(options: Mapping[str, Any], template: Templates) -> dict[str, str]:
    """Return the templates that chats can be rendered by, by their names in a tokenizer.

    Args:
        options: options of a chat; ``chat_template`` among them is a template, or the name of one.
        template: the tokenizer's template, or several by their names.
    """
    several: Mapping[str, str | None] = template if isinstance(template, Mapping) else {DEFAULT: template}
    given: str | None = options.get("chat_template")
    if given is None:
        found = {name: several[name] for name in USED_NAMES if name in several}
    else:
        found = {given: several[given]} if given in several else {DEFAULT: given}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def check_template(options: Mapping[str, Json], template: Templates) -> None:
    """Try the templates that render chats; the arguments are those of ``used_templates``.

    Raises: WrongInput with the fault of the template.
    """
    for name, text in used_templates(options, template).items():
        problem = template_problem(text)
        if problem is not None:
            raise WrongInput(f"the chat template {shown_name(name)}{problem}: correct it, or give another")


def shown_name(name: str) -> str:
    """Return the name of a template before a word; nothing for the default."""
    return "" if name == DEFAULT else f"{name!r} "


_OF_TRANSFORMERS = ("chat_template", "add_generation_prompt", "continue_final_message", "documents", "tools")
"""Options of a chat that transformers reads itself."""


def tell_unread_options(options: Mapping[str, Json], template: Templates) -> None:
    """Warn about options of ``data.apply_chat_template_kwargs`` that no chat template reads.

    The arguments are those of ``used_templates``; of a tokenizer without a template nothing is told.
    """
    texts = used_templates(options, template).values()
    given = [name for name in options if name not in _OF_TRANSFORMERS]
    unread = [name for name in given if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)]
    if unread and texts:
        shown = ", ".join(f"{name}={as_yaml(options[name])}" for name in unread)
        logger.warning("data.apply_chat_template_kwargs: the chat template does not read %s: without effect", shown)
