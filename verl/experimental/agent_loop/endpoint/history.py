"""What was said in a segment, and how incoming requests are compared with it."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2

from verl.base_config import one_line
from verl.experimental.agent_loop.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    RequestError,
    parse_arguments,
)
from verl.utils.chat import Appended, ChatFormat
from verl.workers.rollout.server import TokenOutput

if TYPE_CHECKING:
    from verl.experimental.agent_loop.tool_parser import FunctionCall


@dataclass(frozen=True)
class Answer:
    """What the model answered to a request.

    Attributes: ``prompt_ids`` are all tokens that it saw; ``text`` is its text, without ``calls``; ``place`` is the
        number of its segment, and of its turn there.
    """

    prompt_ids: list[int]
    output: TokenOutput
    text: str
    finish_reason: str
    place: tuple[int, int] = (0, 0)
    calls: list["FunctionCall"] = field(default_factory=list)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def call_id(self, number: int) -> str:
        """Return the id of a tool call.

        It is the same in a replay, since templates may show it, and has nine characters, as those of Mistral ask for.
        """
        segment, turn = self.place
        return f"c{segment % 100:02d}{turn % 1000:03d}{number % 1000:03d}"

    def message(self) -> Message:
        """Return the answer as chat templates take it."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": self.call_id(number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
                }
                for number, call in enumerate(self.calls)
            ]
        return message


@dataclass
class ChatHistory:
    """A conversation: all messages, the last being the assistant's."""

    format: ChatFormat
    tools: list[dict[str, Any]]
    messages: list[Message] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many messages there are."""
        return len(self.messages)

    def later(self, request: ChatRequest) -> list[Message] | None:
        """Return the messages that a request adds; None if it does not continue this conversation."""
        added = request.messages[len(self.messages) :]
        if not added or request.tools != self.tools or any(message["role"] == "assistant" for message in added):
            return None
        return added if self._begins(request.messages, len(self.messages)) else None

    def repeats(self, request: ChatRequest) -> bool:
        """Whether a request is the last one once more."""
        size = len(self.messages) - 1
        return len(request.messages) == size and request.tools == self.tools and self._begins(request.messages, size)

    def _begins(self, messages: Sequence[Message], count: int) -> bool:
        return all(_same(kept, came) for kept, came in zip(self.messages[:count], messages[:count], strict=True))

    def record(self, request: ChatRequest, answer: Answer) -> None:
        """Keep a request and its answer."""
        self.messages = [*self.messages, *request.messages[len(self.messages) :], answer.message()]

    def added(self, messages: Sequence[Message], last: int, keep_history: bool) -> list[int] | None:
        """Return the tokens of new messages, after the token ``last``.

        None if the template now shows earlier turns differently, and these are not kept.
        """
        with refused_templates():
            written = self.format.after_turn(self.messages, messages, stopped=False, keep_history=keep_history)
        if not isinstance(written, Appended):
            return None
        ids = written.token_ids
        return ids[1:] if ids[:1] == [last] else ids  # the end of the turn, unless the model has sampled it


@dataclass
class TextHistory:
    """A text that completions continue: all of it, if they are texts, and its tokens."""

    text: str | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return len(self.token_ids)

    def later(self, request: CompletionRequest) -> str | list[int] | None:
        """Return what a request adds; None if it does not continue this text."""
        prompt = request.prompt
        if isinstance(prompt, str):
            return prompt[len(self.text) :] if self.text is not None and prompt.startswith(self.text) else None
        size = len(self.token_ids)
        return prompt[size:] if prompt[:size] == self.token_ids else None

    def repeats(self, request: CompletionRequest) -> bool:
        """Never: a client that repeats a completion wants another one."""
        return False

    def record(self, request: CompletionRequest, answer: Answer) -> None:
        """Keep a request and its answer."""
        self.text = f"{request.prompt}{answer.text}" if isinstance(request.prompt, str) else None
        self.token_ids = [*answer.prompt_ids, *answer.output.token_ids]


@contextmanager
def refused_templates() -> Iterator[None]:
    """Turn what a chat template raises for the messages of a client into a refusal."""
    try:
        yield
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise RequestError(
            f"the chat template cannot show these messages: {one_line(str(error), 500)}", param="messages"
        ) from error


def _same(kept: Message, came: Message) -> bool:
    """Whether two messages are the same.

    Clients leave out empty fields, strip the text of the assistant, and write the arguments of calls anew.
    """
    if kept["role"] != came["role"]:
        return False
    if kept["role"] != "assistant":
        return kept == came
    return kept["content"].strip() == came["content"].strip() and _functions(kept) == _functions(came)


def _functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]
