"""The agent loop of a model that calls tools, or that talks with a simulated user."""

import asyncio
import logging
import math
import reprlib
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omegaconf import DictConfig

from verl.base_config import one_line
from verl.errors import WrongInput, WrongSetting
from verl.experimental.agent_loop.attempts import Sampling
from verl.experimental.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.registry import register
from verl.experimental.agent_loop.spans import activity
from verl.experimental.agent_loop.tool_media import Media, MediaRules, Shown
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser, get_tool_parser
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, ToolCall, Trajectory, turn_columns, turn_seed
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.calls import CallResult, ToolMethodError, ToolOutcome, answer_of, execute_call, unknown_tool
from verl.tools.schemas import Message as SchemaMessage
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import tools_of
from verl.utils.chat import ChatFormat, ControlTexts, Difference, Restarted, uncut, whole_differences
from verl.utils.dataset.vision_utils import MediaError
from verl.utils.failures import replacing_errors
from verl.utils.json_types import Json, JsonObject
from verl.workers.rollout.server import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.interactions.base import BaseInteraction
    from verl.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

Message = dict[str, Any]
T = TypeVar("T")
_KEY = "actor_rollout_ref.rollout.multi_turn"
_SHOWN_ERROR_CHARS = 500
_USUAL_INTERACTION = "gsm8k"
_END_TIMEOUT_S = 30.0
"""Seconds that a tool or an interaction gets to end an instance."""


class AgentState(Enum):
    """The next action of a trajectory."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass(frozen=True)
class Parts:
    """The objects that all trajectories of a process share; ``differences`` holds the first logged difference."""

    config: DictConfig
    tools: Mapping[str, "BaseTool"]
    schemas: Sequence[JsonObject]
    parser: ToolParser
    chat: ChatFormat
    interactions: Mapping[str, "BaseInteraction"]
    end_tokens: frozenset[int]
    media: MediaRules
    differences: list[Difference] = field(default_factory=list)

    @classmethod
    def of(
        cls, config: DictConfig, tokenizer: "PreTrainedTokenizerBase", processor: "ProcessorMixin | None"
    ) -> "Parts":
        """Read the files that ``rollout.multi_turn`` names, and prove the chat template.

        Raises: WrongInput naming the file or the template's fault.
        """
        node = config.actor_rollout_ref.rollout.multi_turn
        made = tools_of(node)
        tools = {tool.name: tool for tool in made}
        schemas = [tool.get_openai_tool_schema().model_dump(exclude_none=True) for tool in made]
        options = dict(config.data.get("apply_chat_template_kwargs") or {})
        shown = ControlTexts(tokenizer).described(schemas)
        chat = ChatFormat(tokenizer, processor, options, shown, config.data.get("mm_processor_kwargs") or {})
        chat.prove()
        path = node.interaction_config_path
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(
            config,
            tools,
            schemas,
            get_tool_parser(node.format, tokenizer),
            chat,
            initialize_interactions_from_config(path) if path else {},
            frozenset(special | set(tokenizer.all_special_ids)),
            MediaRules.of(config, tokenizer, processor),
        )


@dataclass
class Conversation:
    """A growing trajectory, and the state of its tools and its interaction.

    Attributes:
        messages: the chat, as the template takes it, with cuts in what tools and users say.
        trajectory: its tokens since the prompt, or since the template showed earlier turns differently.
        earlier: the segments before that, each of which becomes a row.
        instances: tool instances by name, each made at the first call.
        calls: the tool calls in the model's last turn.
    """

    messages: list[Message]
    trajectory: Trajectory
    sampling_params: Sampling
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Json]]]
    interaction: "BaseInteraction | None" = None
    interaction_kwargs: JsonObject = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    earlier: list[Trajectory] = field(default_factory=list)
    instances: dict[str, "asyncio.Task[tuple[str, ToolResponse]]"] = field(default_factory=dict)
    calls: list[FunctionCall] = field(default_factory=list)
    model_turns: int = 0
    user_turns: int = 0
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)

    def tool_kwargs(self, tool: str, method: str) -> JsonObject:
        """Return the arguments that the row gives for a method of a tool."""
        return dict((self.tools_kwargs.get(tool) or {}).get(f"{method}_kwargs") or {})


@dataclass
class AgentData:
    """The state of a trajectory for loops in users' forks of verl; ``ToolAgentLoop`` itself uses ``Conversation``.

    A loop fills what its constructor does not take.
    """

    messages: list[Message]
    image_data: Any
    metrics: dict[str, float]
    request_id: str
    tools_kwargs: JsonObject
    interaction: "BaseInteraction | None" = None
    interaction_kwargs: JsonObject | None = None
    prompt_ids: list[int] = field(init=False, default_factory=list)
    response_ids: list[int] = field(init=False, default_factory=list)
    response_mask: list[int] = field(init=False, default_factory=list)
    response_logprobs: list[float] = field(init=False, default_factory=list)
    turn_scores: list[float] = field(init=False, default_factory=list)
    tool_rewards: list[float] = field(init=False, default_factory=list)
    user_turns: int = field(init=False, default=0)
    assistant_turns: int = field(init=False, default=0)
    tool_calls: list[FunctionCall] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.interaction_kwargs = self.interaction_kwargs or {}


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Lets the model call tools, or talk to a simulated user, until a turn without a call ends the conversation.

    A trajectory also ends when its response is full, or after ``max_assistant_turns`` or ``max_user_turns``. A call
    that fails becomes a message to the model, and is counted.
    """

    _parts: ClassVar[Parts | None] = None

    @classmethod
    def init_class(
        cls,
        config: DictConfig,
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Json,
    ) -> None:
        """Make tools, interactions and parser once per process."""
        if cls._parts is None or cls._parts.config is not config:
            cls._parts = Parts.of(config, tokenizer, processor)
        cls._class_initialized = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._parts is not None
        self.parts = self._parts
        rollout = self.config.actor_rollout_ref.rollout
        self.settings = rollout.multi_turn
        self.response_length: int = rollout.response_length
        self.prompt_length: int = rollout.prompt_length
        self.tool_timeout_s: float | None = rollout.agent.get("tool_timeout_s")
        self._is_sglang = rollout.get("name") == "sglang"

    async def run(self, sampling_params: Sampling, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row; several if the chat template has rewritten earlier turns.

        Args: ``kwargs`` has ``raw_prompt``, ``multi_modal_data``, ``tools_kwargs`` and ``interaction_kwargs``.
        """
        handlers = {
            AgentState.PENDING: self._start,
            AgentState.GENERATING: self._generate,
            AgentState.PROCESSING_TOOLS: self._process_tools,
            AgentState.INTERACTING: self._interact,
        }
        talk = self._begin(sampling_params, kwargs)
        try:
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                state = await handlers[state](talk)
            return await self._outputs(talk)
        finally:
            await self._release(talk)

    # ---- the states

    def _begin(self, sampling_params: Sampling, row: Mapping[str, Any]) -> Conversation:
        if row.get("raw_prompt") is None:
            raise WrongSetting(
                "the row has no raw_prompt, the messages of its prompt: set data.return_raw_chat=True, or let the data "
                "set of data.custom_cls return them"
            )
        messages = [dict(message) for message in row["raw_prompt"]]
        prompt = self.parts.chat.prompt(messages)
        if len(prompt) > self.prompt_length:  # before tokens are sampled in vain
            raise WrongInput(
                f"the prompt has {len(prompt)} tokens with the descriptions of its tools, data.max_prompt_length is "
                f"{self.prompt_length}: raise it, shorten the descriptions, or drop such rows by "
                "data.filter_overlong_prompts=true"
            )
        trajectory = Trajectory(prompt, self.response_length, row.get("multi_modal_data"))
        talk = Conversation(messages, trajectory, dict(sampling_params), row.get("tools_kwargs") or {})
        if self.parts.interactions:
            given = row.get("interaction_kwargs") or (row.get("extra_info") or {}).get("interaction_kwargs") or {}
            talk.interaction_kwargs = dict(given)
            talk.interaction = self._interaction(talk.interaction_kwargs.get("name") or self._usual_interaction())
        return talk

    def _usual_interaction(self) -> str | None:
        """Return the interaction of rows that name none: data sets for verl with SGLang leave out the usual name."""
        is_known = self._is_sglang and _USUAL_INTERACTION in self.parts.interactions
        return _USUAL_INTERACTION if is_known else None

    def _interaction(self, name: Json) -> "BaseInteraction":
        known = self.parts.interactions
        if not isinstance(name, str) or name not in known:
            raise WrongInput(
                f"extra_info.interaction_kwargs.name={name}: {_KEY}.interaction_config_path has "
                f"{', '.join(sorted(known))}: each row must name one of them"
            )
        return known[name]

    async def _start(self, talk: Conversation) -> AgentState:
        if talk.interaction is not None:
            start = talk.interaction.start_interaction
            await self._in_time(talk.interaction, "start_interaction", start(talk.id, **talk.interaction_kwargs))
        return AgentState.GENERATING

    async def _generate(self, talk: Conversation) -> AgentState:
        """Sample a turn, and parse its tool calls."""
        trajectory = talk.trajectory
        params = dict(talk.sampling_params)
        params["max_tokens"] = min(trajectory.room, params.get("max_tokens") or trajectory.room)
        if params.get("seed") is not None:
            params["seed"] = turn_seed(params["seed"], talk.model_turns)
        prompt_ids = list(trajectory.token_ids)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=talk.id,
            prompt_ids=prompt_ids,
            sampling_params=params,
            multi_modal_data=trajectory.multi_modal_data or None,
        )
        trajectory.sampled(output, time.perf_counter() - started)
        talk.model_turns += 1
        text = self.parts.parser.text_of(output.token_ids)
        said = ""
        calls: list[FunctionCall] = []
        cut = output.finish_reason == FULL or trajectory.room <= 0
        # The engine would take an image placeholder that the model sampled for the placeholder of the next image.
        cut = cut or not self.parts.media.tokens.isdisjoint(output.token_ids)
        if self.parts.tools and not cut:
            said, calls = await self.parts.parser.extract_tool_calls(output.token_ids, self.parts.schemas, prompt_ids)
            talk.calls = calls[: self.settings.max_parallel_calls]
        talk.messages.append(_assistant(text, said, talk.calls) if calls else _assistant(text))
        if cut or self._has_enough(talk):
            return AgentState.TERMINATED
        if calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if talk.interaction is None else AgentState.INTERACTING

    def _has_enough(self, talk: Conversation) -> bool:
        most_model = self.settings.max_assistant_turns
        most_user = self.settings.max_user_turns
        return bool(most_model and talk.model_turns >= most_model) or bool(most_user and talk.user_turns >= most_user)

    async def _process_tools(self, talk: Conversation) -> AgentState:
        """Run the calls of the last turn, all at the same time."""
        started = time.perf_counter()
        running = [asyncio.create_task(self._recorded_call(talk, call)) for call in talk.calls]
        try:
            results = await asyncio.gather(*running)
        finally:  # if one call ends the trajectory, cancel the other calls
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        seconds = time.perf_counter() - started
        messages: list[Message] = []
        shown = Shown()
        made: list[ToolCall] = []
        for number, (call, result) in enumerate(zip(talk.calls, results, strict=True)):
            answer = result.response
            text = self._shortened(self.parts.media.plain(answer.text or ""))
            outcome = result.outcome
            try:
                new = self.parts.media.loaded(call.name, answer, talk.trajectory.multi_modal_data, shown)
            except MediaError as error:
                text = one_line(f"Error: {error}", _SHOWN_ERROR_CHARS)
                outcome = ToolOutcome.ERROR
                new = Shown()
            shown.extend(new)
            content = new.parts(text) if new else text
            message = {"role": "tool", "name": call.name, "tool_call_id": _call_id(number), "content": content}
            messages.append(self.parts.chat.control.of_others(message))
            made.append(ToolCall(call.name, call.arguments, str(outcome), result.seconds, result.reward, text))
            if result.reward is not None:
                talk.tool_rewards.append(float(result.reward))
        talk.user_turns += 1
        return self._add(talk, "tool", messages, seconds, made, shown=shown)

    async def _recorded_call(self, talk: Conversation, call: FunctionCall) -> CallResult:
        known = f"tool {call.name}" if call.name in self.parts.tools else None
        with activity(call.name, "tool", {"arguments": call.arguments}, on=known) as ended:
            result = await self._call(talk, call)
            shown = {"outcome": str(result.outcome), "reward": result.reward, "text": result.response.text}
            ended(shown)
        return result

    async def _call(self, talk: Conversation, call: FunctionCall) -> CallResult:
        tool = self.parts.tools.get(call.name)
        if call.error is not None:
            return CallResult(ToolResponse(text=f"Error: {call.error}."), ToolOutcome.BAD_ARGUMENTS)
        if tool is None:
            return unknown_tool(call.name, self.parts.tools)
        is_first = tool.name not in talk.instances
        if is_first:
            talk.instances[tool.name] = asyncio.create_task(self._created(talk, tool))
        started = time.monotonic()
        try:
            instance_id, greeting = await asyncio.shield(talk.instances[tool.name])
            if not isinstance(greeting, ToolResponse):
                raise TypeError(f"create returned {type(greeting).__name__} as its greeting, not ToolResponse")
        except WrongInput:
            raise
        except Exception as error:  # a tool may raise anything; its trajectory goes on
            outcome = ToolOutcome.TIMEOUT if isinstance(error, TimeoutError) else ToolOutcome.ERROR
            text = one_line(f"Error: {type(error).__name__}: {error}", _SHOWN_ERROR_CHARS)
            return CallResult(ToolResponse(text=text), outcome, time.monotonic() - started)
        kwargs = talk.tool_kwargs(tool.name, "execute")
        result = await execute_call(tool, instance_id, call.arguments, self.tool_timeout_s, **kwargs)
        if not is_first or greeting.is_empty():
            return result
        return CallResult(
            _joined(greeting, result.response), result.outcome, result.seconds, result.reward, result.metrics
        )

    async def _created(self, talk: Conversation, tool: "BaseTool") -> tuple[str, ToolResponse]:
        """Create the instance of a tool in a separate task, since several calls may wait for it."""
        made = tool.create(create_kwargs=talk.tool_kwargs(tool.name, "create"))
        given = await asyncio.wait_for(answer_of(made, f"create of {tool.name}"), self.tool_timeout_s)
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"create returned {type(given).__name__}, not (instance id, ToolResponse)")
        return given[0], given[1]

    async def _interact(self, talk: Conversation) -> AgentState:
        """Let the user answer the last turn."""
        assert talk.interaction is not None
        started = time.perf_counter()
        messages = uncut(talk.messages)
        with activity("user", "user", {"interaction": talk.interaction_kwargs.get("name")}) as ended:
            answer = talk.interaction.generate_response(talk.id, messages, **talk.interaction_kwargs)
            given = await self._in_time(talk.interaction, "generate_response", answer)
            ends, text, score = _checked_answer(talk.interaction, given)
            ended({"text": text, "score": score, "ends": ends})
        text = self.parts.media.plain(text)
        seconds = time.perf_counter() - started
        talk.user_turns += 1
        if score is not None:
            talk.turn_scores.append(score)
        if ends:
            talk.trajectory.add("user", [], seconds, text=text)
            return AgentState.TERMINATED
        message = self.parts.chat.control.of_others({"role": "user", "content": text})
        return self._add(talk, "user", [message], seconds, text=text)

    async def _in_time(self, interaction: "BaseInteraction", method: str, answer: Awaitable[T]) -> T:
        """Wait for a method of an interaction, within its time limit; without the user's answer the attempt fails.

        Raises: TimeoutError at its deadline; RuntimeError for what it raises, unless it refuses the row.
        """
        where = f"{method} of the interaction {interaction.name}"
        try:
            async with asyncio.timeout(self.tool_timeout_s) as limit:
                return await answer
        except WrongInput:
            raise
        except Exception as error:  # an interaction may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimeoutError(
                    f"{where} has not answered within rollout.agent.tool_timeout_s={self.tool_timeout_s:g}"
                ) from None
            raise RuntimeError(f"{where} failed: {type(error).__name__}: {error}") from error

    # ---- what a turn adds

    def _add(
        self,
        talk: Conversation,
        role: str,
        messages: list[Message],
        seconds: float,
        calls: Sequence[ToolCall] = (),
        text: str | None = None,
        shown: Shown | None = None,
    ) -> AgentState:
        """Append messages and the next generation prompt; end the trajectory if nothing more would fit."""
        chat = self.parts.chat
        trajectory = talk.trajectory
        last = trajectory.response_ids[-1] if trajectory.response_ids else None
        options: dict[str, Any] = {
            "stopped": last in self.parts.end_tokens,
            "last_token": last,
            "keep_history": not self.settings.use_inference_chat_template,
        }
        grown = chat.after_turn(talk.messages, messages, **options)
        if isinstance(grown, Restarted):
            media = self.parts.media.joined(trajectory.multi_modal_data, shown)
            self.parts.media.check_shown(grown.prompt_ids, media, f"{_KEY}.use_inference_chat_template=true")
            seen = chat.after_turn(
                talk.messages, messages, images=media.get("image", ()), videos=media.get("video", ()), **options
            )
            assert isinstance(seen, Restarted)
            sizes = (grown.prompt_ids, len(seen.prompt_ids))
            return self._restart(talk, role, messages, *sizes, media, seconds, calls, text)
        seen_ids = grown.token_ids
        if shown:
            expanded = chat.after_turn(talk.messages, messages, images=shown.images, videos=shown.videos, **options)
            assert not isinstance(expanded, Restarted)
            seen_ids = expanded.token_ids
        if len(seen_ids) >= trajectory.room:  # not even one token could follow
            trajectory.add(role, [], seconds, calls, text)
            return AgentState.TERMINATED
        talk.messages += messages
        if shown:
            media = {"images": shown.images, "videos": shown.videos, "expanded_ids": seen_ids}
            trajectory.add(role, grown.token_ids, seconds, calls, text, **media)
        else:
            trajectory.add(role, grown.token_ids, seconds, calls, text)
        return AgentState.GENERATING

    def _restart(
        self,
        talk: Conversation,
        role: str,
        messages: list[Message],
        prompt_ids: list[int],
        seen_size: int,
        media: Media,
        seconds: float,
        calls: Sequence[ToolCall],
        text: str | None,
    ) -> AgentState:
        """Go on with a new prompt, since the chat template shows earlier turns differently now.

        Args: ``seen_size`` is how many tokens the engine makes of ``prompt_ids`` with ``media``.
        """
        trajectory = talk.trajectory
        trajectory.add(role, [], seconds, calls, text)
        # Prompt tokens above the limit, which the row holds at the start of its response.
        beyond = max(0, seen_size - self.prompt_length)
        room = min(trajectory.room, self.response_length - beyond)
        if room <= 0:
            return AgentState.TERMINATED
        talk.messages += messages
        talk.earlier.append(trajectory)
        talk.trajectory = Trajectory(prompt_ids, room, media)
        return AgentState.GENERATING

    def _shortened(self, text: str) -> str:
        """Cut the text of a tool: side ``left`` keeps its head, ``right`` its tail, ``middle`` half of each."""
        most = self.settings.max_tool_response_length
        side = self.settings.tool_response_truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return text[:most] + "...(truncated)"
        if side == "right":
            return "(truncated)..." + text[len(text) - most :]
        half = most // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]

    # ---- the end

    async def _outputs(self, talk: Conversation) -> AgentLoopOutput | list[AgentLoopOutput]:
        rewards: JsonObject = {}
        for name, task in talk.instances.items():
            if not task.done() or task.cancelled() or task.exception() is not None:
                continue
            rewards[name] = await self._reward_of(name, task.result()[0], talk.tool_kwargs(name, "calc_reward"))
        if talk.interaction is not None:
            rewards["user_turn_rewards"] = list(talk.turn_scores)
        segments = [*talk.earlier, talk.trajectory]
        shared = {"turn_scores": talk.turn_scores, "tool_rewards": talk.tool_rewards, "reward_scores": rewards}
        if self._is_sglang:  # SGLang rollouts have this column in the established verl interface
            shared["messages"] = {"messages": [SchemaMessage(**message) for message in uncut(talk.messages)]}
        num_turns = 1 + sum(len(each.turns) for each in segments)
        outputs = [
            each.output(num_turns=num_turns, extra_fields=shared | {TURNS_COLUMN: turn_columns(each.turns)})
            for each in segments
        ]
        self._compare(talk)
        return outputs if len(outputs) > 1 else outputs[0]

    async def _reward_of(self, tool: str, instance_id: str, kwargs: Mapping[str, Json]) -> float:
        """Return the reward of an instance of a tool.

        Raises: ValueError naming the tool.
        """
        made = self.parts.tools[tool].calc_reward(instance_id, **kwargs)

        def named(error: Exception) -> ValueError:
            return ValueError(f"calc_reward of the tool {tool} failed: {type(error).__name__}: {error}")

        with replacing_errors(named, passes=(ToolMethodError,)):
            given = await asyncio.wait_for(answer_of(made, f"calc_reward of {tool}"), self.tool_timeout_s)
            reward = float(given)
        if not math.isfinite(reward):
            raise ValueError(f"calc_reward of the tool {tool} returned {reward}, which is no finite number")
        return reward

    def _compare(self, talk: Conversation) -> None:
        """Compare the tokens with the template's rendering of the whole chat; stop comparing after a logged difference.

        A difference is no fault of the trajectory: a model may write a call otherwise than the template would.
        """
        mode = self.settings.tokenization_sanity_check_mode
        if self.parts.differences:
            return
        found = whole_differences(self.parts.chat, talk.messages, talk.trajectory.token_ids, mode)
        if found:
            self.parts.differences.append(found[0])
            logger.warning(
                "%s.tokenization_sanity_check_mode=%s: a trajectory is not what the chat template makes of its "
                "messages, %s; it stays as it was sampled (further differences are not logged)",
                *(_KEY, mode, found[0]),
            )

    async def _release(self, talk: Conversation) -> None:
        """End the instances of tools and the interaction, whatever has happened."""
        for name, task in talk.instances.items():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                instance_id = (await task)[0]
                released = self.parts.tools[name].release(instance_id, **talk.tool_kwargs(name, "release"))
                await asyncio.wait_for(answer_of(released, f"release of {name}"), _END_TIMEOUT_S)
        if talk.interaction is not None:
            with suppress(Exception):
                await asyncio.wait_for(talk.interaction.finalize_interaction(talk.id), _END_TIMEOUT_S)


def _checked_answer(interaction: "BaseInteraction", given: Any) -> tuple[bool, str, float | None]:
    """Return whether the conversation ends, the text of the user, and the score of the turn, if there is one.

    Raises: RuntimeError naming the interaction.
    """
    where = f"generate_response of the interaction {interaction.name} returned"
    if not isinstance(given, tuple | list) or len(given) != 4:
        raise RuntimeError(f"{where} {_SHORT.repr(given)}: it must return (ends, text, score, info)")
    ends, text, score, _ = given
    if text is not None and not isinstance(text, str):
        raise RuntimeError(f"{where} the text {_SHORT.repr(text)}: it must be a str")
    try:
        value = None if score is None else float(score)
    except (TypeError, ValueError):
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise RuntimeError(f"{where} the score {_SHORT.repr(score)}: it must be a finite number")
    return bool(ends), text or "", value


_SHORT = reprlib.Repr()


def _assistant(text: str, said: str = "", calls: Sequence[FunctionCall] = ()) -> Message:
    """Return the message of a turn; broken calls stay text."""
    if not calls or any(call.error is not None for call in calls):
        return {"role": "assistant", "content": text}
    written = [
        {
            "id": _call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": said, "tool_calls": written}


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits, which Mistral's templates want


def _joined(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    texts = [each.text for each in (first, second) if each.text]
    media = {
        kind: [*(getattr(first, kind) or []), *(getattr(second, kind) or [])] or None for kind in ("image", "video")
    }
    return ToolResponse(text="\n".join(texts) or None, **media)
