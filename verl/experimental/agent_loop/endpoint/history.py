"""The messages of a segment, and their comparison with incoming requests."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jinja2

from verl.base_config import one_line
from verl.experimental.agent_loop.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    RequestError,
    parse_arguments,
)
from verl.experimental.agent_loop.endpoint.stops import Rest
from verl.utils.chat import Appended, ChatFormat
from verl.utils.json_types import JsonObject
from verl.workers.rollout.server import TokenOutput

if TYPE_CHECKING:
    from verl.experimental.agent_loop.tool_parser import FunctionCall


@dataclass(frozen=True)
class Answer:
    """The model's answer to a request.

    Attributes: ``prompt_ids`` are all tokens that it saw; ``text`` is its text, without ``calls``; ``place`` is the
        number of its segment, and of its turn there; ``rest`` is what its tokens hold after the text.
    """

    prompt_ids: list[int]
    output: TokenOutput
    text: str
    finish_reason: str
    place: tuple[int, int] = (0, 0)
    calls: list["FunctionCall"] = field(default_factory=list)
    rest: Rest = Rest()
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def call_id(self, number: int) -> str:
        """Return the id of a tool call.

        The id is the same in a replay, since templates may show it. It has nine characters, as Mistral's templates
        require.
        """
        segment, turn = self.place
        return f"c{segment % 100:02d}{turn % 1000:03d}{number % 1000:03d}"

    def message(self) -> Message:
        """Return the answer as a message for chat templates."""
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
    """A conversation, whose last message is the assistant's; ``rests`` holds further parts of answers by index."""

    tools: list[JsonObject]
    messages: list[Message] = field(default_factory=list)
    rests: dict[int, Rest] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of messages."""
        return len(self.messages)

    def later(self, request: ChatRequest) -> list[Message] | None:
        """Return the messages that a request adds; None if it does not continue this conversation."""
        added = request.messages[len(self.messages) :]
        if not added or request.tools != self.tools or any(message["role"] == "assistant" for message in added):
            return None
        return added if self._begins(request.messages, len(self.messages)) else None

    def repeats(self, request: ChatRequest) -> bool:
        """Whether a request repeats the last request."""
        size = len(self.messages) - 1
        return len(request.messages) == size and request.tools == self.tools and self._begins(request.messages, size)

    def _begins(self, messages: Sequence[Message], count: int) -> bool:
        pairs = zip(self.messages[:count], messages[:count], strict=True)
        return all(_same(kept, came, self.rests.get(at, Rest())) for at, (kept, came) in enumerate(pairs))

    def record(self, request: ChatRequest, answer: Answer) -> None:
        """Keep a request and its answer."""
        self.messages = [*self.messages, *request.messages[len(self.messages) :], answer.message()]
        self.rests[len(self.messages) - 1] = answer.rest

    def added(self, form: ChatFormat, messages: Sequence[Message], last: int, keep_history: bool) -> list[int] | None:
        """Return the tokens of new messages in a chat format, after the token ``last``.

        None if the template now shows earlier turns differently, and these are not kept.
        """
        stopped = self.rests[len(self.messages) - 1].ends_turn
        written = form.after_turn(self.messages, messages, stopped=stopped, last_token=last, keep_history=keep_history)
        if not isinstance(written, Appended):
            return None
        ids = written.token_ids
        # The sampled stop text may already be the end-of-turn token.
        return ids[1:] if not stopped and ids[:1] == [last] else ids


@dataclass
class TextHistory:
    """A text that completion requests continue: its tokens, and its text if the requests send texts.

    ``rest`` is the rest of the last answer.
    """

    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    rest: Rest = Rest()

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.token_ids)

    def later(self, request: CompletionRequest) -> str | list[int] | None:
        """Return the prompt part that a request adds to the tokens; None if it does not continue this text.

        A client that adds the stop text, which answers lack, adds nothing: the model has sampled it.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            is_continued = self.text is not None and prompt.startswith(self.text)
            return self.rest.taken_from(prompt[len(self.text or "") :]) if is_continued else None
        size = len(self.token_ids)
        return prompt[size:] if prompt[:size] == self.token_ids else None

    def repeats(self, request: CompletionRequest) -> bool:
        """Return False: a client that repeats a completion request wants another completion."""
        return False

    def record(self, request: CompletionRequest, answer: Answer) -> None:
        """Keep a request and its answer."""
        self.text = f"{request.prompt}{answer.text}" if isinstance(request.prompt, str) else None
        self.token_ids = [*answer.prompt_ids, *answer.output.token_ids]
        self.rest = answer.rest


@contextmanager
def refused_templates() -> Iterator[None]:
    """Turn an error of the chat template over a client's messages into a refusal."""
    try:
        yield
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise RequestError(
            f"the chat template cannot show these messages: {one_line(str(error), 500)}", param="messages"
        ) from error


def _same(kept: Message, came: Message, rest: Rest) -> bool:
    """Whether two messages are the same.

    Clients leave out empty fields, strip the text of the assistant, serialize the arguments of calls again, and add the
    stop text that an answer lacks.
    """
    if kept["role"] != came["role"]:
        return False
    if kept["role"] != "assistant":
        return kept == came
    forms = {(kept["content"] + rest.text[:size]).strip() for size in (0, rest.size, len(rest.text))}
    return came["content"].strip() in forms and _functions(kept) == _functions(came)


def _functions(message: Message) -> list[JsonObject]:
    return [call["function"] for call in message.get("tool_calls", [])]
