"""Chat templates, which are programs: rendering within a time limit, and a trial in a process before a run starts."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.base_config import WrongInput, as_yaml
from verl.utils.process_pool import START_TIMEOUT_S, IsolatedFunction
from verl.utils.time_limit import TimeLimitExceeded, UserCodeFailed, time_limit

RENDER_TIMEOUT_S = 60.0
TRIAL_TIMEOUT_S = 10.0
_MAY_LOOP = re.compile(r"range|macro|recursive|lipsum|\*|\d{5}")
_SHOWN_CHARS = 200
_in_thread = threading.local()

logger = logging.getLogger(__name__)


class ChatTemplateTimeout(jinja2.TemplateError):
    """A chat template does not end."""


class HasChatTemplate(Protocol):
    """A tokenizer or a processor."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a conversation as text or tokens."""


def render_chat(templater: HasChatTemplate, messages: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the text of a chat; ``options`` are those of ``apply_chat_template``.

    Raises: ChatTemplateTimeout after ``RENDER_TIMEOUT_S``, and the errors of the template.
    """
    try:
        with nullcontext() if getattr(_in_thread, "shares_limit", False) else time_limit(RENDER_TIMEOUT_S):
            text: str = templater.apply_chat_template(messages, **options)
            return text
    except TimeLimitExceeded as error:
        shown = repr(messages)[:_SHOWN_CHARS]
        raise ChatTemplateTimeout(f"it did not end within {RENDER_TIMEOUT_S:g} s for {shown}") from error


def check_awaits_turn(messages: Sequence[Any]) -> None:
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
    """Let all ``render_chat`` in the block share one limit of ``RENDER_TIMEOUT_S``: many short ones cost less so.

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


def template_problem(template: str, timeout_s: float = TRIAL_TIMEOUT_S) -> str | None:
    """Return why a template is not valid Jinja, or why rendering a chat of one message does not end; else None.

    Only templates that can compute without end are rendered, in a process. Tags of transformers are left to it.
    """
    try:
        _environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error):
            return f"is not valid Jinja, line {error.lineno}: {error.message}"
    if not _MAY_LOOP.search(template):
        return None
    trial = IsolatedFunction(_load_trial, {}, START_TIMEOUT_S)
    try:
        trial.start()
        with time_limit(timeout_s):
            trial(template)
    except TimeLimitExceeded:
        return f"does not end within {timeout_s:g} s for a chat of one message"
    except UserCodeFailed as error:
        return f"{error} for a chat of one message" if str(error).startswith("died") else None
    finally:
        trial.close()
    return None


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])


def _load_trial() -> Callable[[str], None]:
    return _render_once


def _render_once(template: str) -> None:
    """Render as transformers does, apart from its filters and tags: those who lack them raise, which is no problem."""
    messages = [{"role": "user", "content": "1 + 1 = ?"}]
    _environment().from_string(template).render(messages=messages, add_generation_prompt=True)


_OF_TRANSFORMERS = ("chat_template", "add_generation_prompt", "continue_final_message", "documents", "tools")
"""Options of a chat that transformers reads itself."""


def tell_unread_options(options: Mapping[str, Any], template: object) -> None:
    """Name the options of ``data.apply_chat_template_kwargs`` that a chat template does not: they have no effect.

    A template among the options replaces the given one; of a model that has several, or none, nothing is told.
    """
    template = options.get("chat_template") or template
    if not isinstance(template, str):
        return
    given = [name for name in options if name not in _OF_TRANSFORMERS]
    unread = [name for name in given if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        shown = ", ".join(f"{name}={as_yaml(options[name])}" for name in unread)
        logger.warning("data.apply_chat_template_kwargs: the chat template does not read %s: without effect", shown)
