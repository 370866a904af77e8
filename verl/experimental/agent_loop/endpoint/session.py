"""The endpoint's record of a trajectory: its token segments, and how incoming messages continue them."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from verl.base_config import one_line
from verl.errors import ChatFormatError, RequestAbortedError, ServerError
from verl.experimental.agent_loop.attempts import Sampling
from verl.experimental.agent_loop.endpoint.history import Answer, ChatHistory, TextHistory, refused_templates
from verl.experimental.agent_loop.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    Options,
    RequestError,
)
from verl.experimental.agent_loop.endpoint.stops import cut_at_stop
from verl.experimental.agent_loop.endpoint.templates import Templates, texts_in
from verl.experimental.agent_loop.trajectory import ToolCall, Trajectory, turn_seed
from verl.utils.chat import ChatFormat
from verl.utils.json_types import JsonObject
from verl.utils.numerics.seeding import derive_seed
from verl.workers.rollout.server import TokenOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.experimental.agent_loop.servers import AsyncLLMServerManager
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

Said = TypeVar("Said", ChatHistory, TextHistory)
Later = TypeVar("Later")
Written = TypeVar("Written")
CLIENT_SAMPLING = ("refuse", "ignore", "apply")
FULL = "context_length_exceeded"
"""The code of the error of a request for which there is no room."""


@dataclass(frozen=True)
class Policy:
    """The settings that all trajectories of a process share.

    Attributes:
        model: the name of the model in answers.
        parser: finds tool calls in what the model wrote.
        prompt_length, response_length: the most tokens of the first prompt of a segment, and of all that follows.
        client_sampling: what to do with a sampling parameter, such as temperature, that differs from the run's:
            ``refuse`` the request, ``ignore`` the value, or ``apply`` it.
        keep_history: whether what the model sampled stays in later prompts as it was, also where the chat template
            shows earlier turns differently; else a new segment starts there.
        most_calls: the most tool calls of an answer; further ones stay in its tokens only. None: all.
        engine_stops: whether the engine has a tokenizer, and so ends a response at a stop text itself.
    """

    server_manager: "AsyncLLMServerManager"
    templates: Templates
    parser: "ToolParser"
    model: str
    prompt_length: int
    response_length: int
    client_sampling: str = "refuse"
    keep_history: bool = True
    most_calls: int | None = None
    engine_stops: bool = False

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the policy."""
        return self.templates.tokenizer


@dataclass
class Added:
    """The tokens that a request adds to a segment, and their author."""

    token_ids: list[int] = field(default_factory=list)
    role: str = "user"
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Segment(Generic[Said]):
    """A token sequence that only grows at its end, with the messages that it encodes."""

    number: int
    history: Said
    trajectory: Trajectory
    busy: bool = False
    answers: list[Answer] = field(default_factory=list)
    answered: float = 0.0

    def added(self, token_ids: list[int], messages: Sequence[Message]) -> Added:
        """Return the tokens that new messages add; tool messages are timed from the last answer."""
        role = messages[0]["role"]
        seconds = time.perf_counter() - self.answered if role == "tool" else 0.0
        text = "\n".join(message["content"] for message in messages)
        return Added(token_ids, role, text, _calls(messages, self.answers[-1], seconds), seconds)


AnySegment = Segment[ChatHistory] | Segment[TextHistory]


def _calls(messages: Sequence[Message], answer: Answer, seconds: float) -> list[ToolCall]:
    """Return the calls that tool messages reply to, with the outcome "ok", since only the agent knows it."""
    replies = [message for message in messages if message["role"] == "tool"]
    ids = {answer.call_id(number): number for number in range(len(answer.calls))}
    found = []
    for place, reply in enumerate(replies):
        number = ids.get(reply.get("tool_call_id", ""), place)
        if number < len(answer.calls):
            call = answer.calls[number]
            found.append(ToolCall(call.name, call.arguments, "ok", seconds, None, str(reply["content"])))
    return found


@dataclass(frozen=True)
class _Text:
    """A text of a request, its location, and whether every chat template keeps it in later turns."""

    where: str
    text: str
    is_shown: bool = True


def _texts_of(request: ChatRequest) -> Iterator[_Text]:
    for number, message in enumerate(request.messages):
        is_given = message["role"] != "assistant"  # templates may drop what the model has thought
        yield _Text(f"messages[{number}].content", message["content"], is_given)
        for call in message.get("tool_calls", ()):
            yield _Text(f"messages[{number}].tool_calls", "".join(texts_in(call["function"])), is_given)
    for number, tool in enumerate(request.tools):
        yield _Text(f"tools[{number}]", "".join(texts_in(tool["function"])))


class Session:
    """One trajectory of a separate agent program.

    A request continues the segment whose history it repeats, and adds its new messages as tokens; what the model
    sampled stays as it was. A request that continues no segment starts one.

    Args: ``sampling_params`` are those of the run for this sample.
    """

    def __init__(self, policy: Policy, sampling_params: Sampling) -> None:
        self.policy = policy
        self.name = uuid.uuid4().hex
        self._chats: list[Segment[ChatHistory]] = []
        self._texts: list[Segment[TextHistory]] = []
        self.fault: Exception | None = None
        """Why the last request failed, if the servers were the reason."""
        self.refused: RequestError | None = None
        """The last request that was refused."""
        self.is_full = False
        """Whether a request found no room."""
        self.order = asyncio.Lock()
        """Held while a request becomes tokens, so that threads change neither the order of requests nor their seeds."""
        self._sampling = dict(sampling_params)
        self._started = 0

    @property
    def segments(self) -> list[AnySegment]:
        """The segments with sampled tokens, in the order of their start."""
        every: list[AnySegment] = [*self._chats]
        every += self._texts
        return sorted((each for each in every if each.answers), key=lambda segment: segment.number)

    async def chat(self, request: ChatRequest, is_retry: bool = False) -> Answer:
        """Return the next message of the assistant.

        Args: ``is_retry`` says that the client sends its last request again, because it saw no answer.
        Raises: RequestError; ServerError if no server can answer.
        """
        async with self.order:
            self._check_sizes(_texts_of(request))
            repeated = self._repeated(request) if is_retry else None
            if repeated is not None:
                return repeated
            segment, added = await self._continued_chat(request) or await self._new_chat(request)
            segment.busy = True
        answer = await self._ask(segment, request.options, added, request.tools)
        segment.history.record(request, answer)
        return answer

    async def complete(self, request: CompletionRequest) -> Answer:
        """Return the continuation of a text or of tokens; see ``chat``."""
        async with self.order:
            segment, added = await self._text(request)
            segment.busy = True
        answer = await self._ask(segment, request.options, added, [])
        segment.history.record(request, answer)
        return answer

    async def _text(self, request: CompletionRequest) -> "tuple[Segment[TextHistory], Added]":
        """Return the segment that a completion continues or starts, and the tokens that it adds."""
        prompt = request.prompt
        self._check_sizes([_Text("prompt", prompt)] if isinstance(prompt, str) else [])
        found: tuple[Segment[TextHistory], str | list[int]] | None
        found = _longest([(segment, segment.history.later(request)) for segment in self._texts])
        if found is not None:
            segment, later = found
            ids = await self._encode(later, special=False) if isinstance(later, str) else later
            return segment, Added(ids, text=later if isinstance(later, str) else None)
        ids = await self._encode(prompt, special=True) if isinstance(prompt, str) else prompt
        segment = self._start(TextHistory(), ids)
        self._texts.append(segment)
        return segment, Added()

    def _check_sizes(self, texts: Iterable[_Text]) -> None:
        """Refuse texts that surely exceed the tokens of a trajectory without encoding them, which takes seconds per MB.

        Raises: RequestError naming the text that is too much.
        """
        most = self.policy.prompt_length + self.policy.response_length
        fewest = self.policy.templates.fewest_tokens
        if fewest is None:
            return
        before = 0
        for each in texts:
            count = fewest(each.text)
            if before + count > most:
                self.is_full = True
                others = f", those before it at least {before}" if before else ""
                raise RequestError(
                    f"{each.where} has at least {count} tokens{others}, and a trajectory has room for {most} "
                    "(data.max_prompt_length + data.max_response_length)",
                    each.where,
                    code=FULL,
                )
            before += count if each.is_shown else 0

    def _repeated(self, request: ChatRequest) -> Answer | None:
        """Return the answer to a request that a client sends again."""
        for segment in self._chats:
            if segment.answers and segment.history.repeats(request):
                return segment.answers[-1]
        return None

    async def _continued_chat(self, request: ChatRequest) -> "tuple[Segment[ChatHistory], Added] | None":
        """Return the conversation that a request continues, and the messages that it adds."""
        found = _longest([(segment, segment.history.later(request)) for segment in self._chats])
        if found is None:
            return None
        segment, messages = found
        last = segment.trajectory.token_ids[-1]
        keep = self.policy.keep_history
        history = segment.history
        ids = await self._write(request, lambda form: history.added(form, messages, last, keep))
        return None if ids is None else (segment, segment.added(ids, messages))

    async def _new_chat(self, request: ChatRequest) -> "tuple[Segment[ChatHistory], Added]":
        prompt = await self._write(request, lambda form: form.prompt(request.messages))
        segment = self._start(ChatHistory(request.tools), prompt)
        self._chats.append(segment)
        return segment, Added()

    async def _write(self, request: ChatRequest, write: Callable[[ChatFormat], Written]) -> Written:
        """Return the tokens that the chat format writes for a request; runs in a thread."""

        def written(templates: Templates) -> Written:
            try:
                form = templates.of(request.tools)
            except ChatFormatError as error:
                self.fault = error
                raise RequestError(one_line(str(error), 500)) from error
            with refused_templates():
                return write(form)

        size = sum(len(each.text) for each in _texts_of(request))
        return await self.policy.templates.write(size, written)

    async def _encode(self, text: str, special: bool) -> list[int]:
        def encoded(templates: Templates) -> list[int]:
            ids: list[int] = templates.tokenizer.encode(text, add_special_tokens=special)
            return ids

        return await self.policy.templates.write(len(text), encoded)

    def _start(self, history: Said, prompt_ids: list[int]) -> Segment[Said]:
        limit = self.policy.prompt_length
        beyond = max(0, len(prompt_ids) - limit)
        room = self.policy.response_length - beyond
        if beyond and not self.segments:
            self.is_full = True
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, and a trajectory starts with at most {limit} "
                "(data.max_prompt_length)",
                code=FULL,
            )
        if room <= 0:
            self.is_full = True
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, and a later segment of a trajectory has room for "
                f"{limit + self.policy.response_length} (data.max_prompt_length + data.max_response_length)",
                code=FULL,
            )
        segment = Segment(self._started, history, Trajectory(prompt_ids, room))
        self._started += 1
        return segment

    async def _ask(self, segment: AnySegment, options: Options, added: Added, tools: Sequence[JsonObject]) -> Answer:
        """Let the model continue a segment; only an answer changes the segment."""
        segment.busy = True
        try:
            return await self._answered(segment, options, added, tools)
        finally:
            segment.busy = False
            if not segment.answers:
                self._chats = [each for each in self._chats if each is not segment]
                self._texts = [each for each in self._texts if each is not segment]
                numbers = [each.number for each in self._chats] + [each.number for each in self._texts]
                self._started = max(numbers, default=-1) + 1

    async def _answered(
        self, segment: AnySegment, options: Options, added: Added, tools: Sequence[JsonObject]
    ) -> Answer:
        trajectory = segment.trajectory
        room = trajectory.room - len(added.token_ids)
        if room < 1:
            self.is_full = True
            raise RequestError(
                f"the new messages have {len(added.token_ids)} tokens, and the trajectory has room for "
                f"{trajectory.room} of {self.policy.response_length} (data.max_response_length)",
                param="messages",
                code=FULL,
            )
        prompt_ids = [*trajectory.token_ids, *added.token_ids]
        params = self._params(segment, options)
        params["max_tokens"] = min(room, options.max_tokens or room)
        started = time.perf_counter()
        output = await self._generate(segment, prompt_ids, params)
        output, text, rest = cut_at_stop(self.policy.tokenizer, output, options.stop)
        finish = str(output.finish_reason)
        kept = text
        calls: list[FunctionCall] = []
        if tools:
            kept, calls = await self.policy.parser.extract_tool_calls(output.token_ids, tools, prompt_ids)
        if calls and all(call.name for call in calls):  # else a call is too broken to be named
            text = kept
            calls = calls[: self.policy.most_calls]
            finish = "tool_calls"
        else:
            calls = []
        answer = Answer(prompt_ids, output, text, finish, (segment.number, len(segment.answers)), calls, rest)
        if added.token_ids:
            trajectory.add(added.role, added.token_ids, added.seconds, added.calls, added.text)
        wanted = output if self._sampling.get("logprobs") else replace(output, log_probs=None)
        trajectory.sampled(wanted, time.perf_counter() - started)
        segment.answers.append(answer)
        segment.answered = time.perf_counter()
        self.fault = None
        return answer

    async def _generate(self, segment: AnySegment, prompt_ids: list[int], params: Sampling) -> TokenOutput:
        try:
            return await self.policy.server_manager.generate(
                f"{self.name}-{segment.number}", prompt_ids=prompt_ids, sampling_params=params
            )
        except ServerError as error:
            self.fault = error
            raise
        except RequestAbortedError as error:
            self.fault = error
            raise RequestError(one_line(str(error), 500), status=503) from error
        except TimeoutError as error:
            self.fault = error
            raise RequestError(one_line(str(error), 500), status=504) from error
        except ValueError as error:  # the engine refuses the request
            raise RequestError(one_line(str(error), 500)) from error

    def _params(self, segment: AnySegment, options: Options) -> Sampling:
        """Return how to sample the next turn of a segment.

        Raises: RequestError for a value that differs from that of the run, if such requests are refused.
        """
        params = dict(self._sampling)
        turn = len(segment.answers)
        if params.get("seed") is not None:
            seed = params["seed"] if segment.number == 0 else derive_seed(params["seed"], "segment", segment.number)
            params["seed"] = turn_seed(seed, turn)
        policy = self.policy
        if policy.client_sampling == "refuse":
            for name, value in options.sampling.items():
                used = params.get(name, _NEUTRAL.get(name))
                if name != "seed" and value != used:
                    raise RequestError(
                        f"{name}={value}: the run samples with {name}={used}, and trains on that: leave it out, or "
                        "give the agent loop client_sampling=ignore (to use the run's) or apply (to use this one)",
                        param=name,
                    )
        elif policy.client_sampling == "apply":
            params |= options.sampling
        params["logprobs"] = bool(params.get("logprobs")) or options.wants_log_probs
        if options.stop and policy.engine_stops:
            params["stop"] = list(options.stop)
        return params


def _longest(found: "Sequence[tuple[Segment[Said], Later | None]]") -> "tuple[Segment[Said], Later] | None":
    """Return the segment with the longest history that a request continues, and what the request adds."""
    fitting = [(segment, later) for segment, later in found if later is not None and segment.answers]
    free = [(segment, later) for segment, later in fitting if not segment.busy]
    return max(free, key=lambda each: each[0].history.length, default=None)


_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
