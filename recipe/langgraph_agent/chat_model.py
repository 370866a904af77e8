"""A LangChain chat model that samples from verl's rollout servers and records the tokens of its conversation."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall, convert_to_openai_messages
from langchain_core.messages import ToolCall as LangChainCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.endpoint.history import Answer
from verl.experimental.agent_loop.endpoint.requests import RequestError, parse_chat
from verl.experimental.agent_loop.endpoint.session import FULL, Policy, Session
from verl.experimental.agent_loop.endpoint.templates import Templates
from verl.experimental.agent_loop.tool_parser import get_tool_parser
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, turn_columns

TRAJECTORY = "trajectory"
"""The key of ``AIMessage.response_metadata`` that holds the trajectory up to this message, as plain values."""


class TrajectoryFullError(RuntimeError):
    """The trajectory has no token left for the next turn."""


class ChatModel(BaseChatModel):
    """The policy as a LangChain chat model. An instance records one trajectory: create a new one for each.

    Attributes:
        model: name of the model.
        client: the ``AsyncLLMServerManager`` of the agent loop.
        tokenizer: the tokenizer of the policy.
        max_tokens: maximum number of tokens after the first prompt, tool answers included.
        tool_parser: format of the model's tool calls, as in ``rollout.multi_turn.format``.
        max_parallel_calls: maximum number of tool calls in a turn; further calls are not run.
        temperature, top_p, repetition_penalty: sampling parameters.
        sampling_params: sampling parameters of the run, such as ``seed`` and ``logprobs``; these override the others.
        max_prompt_tokens: maximum number of tokens in the first prompt.
        template_options: further arguments of the chat template.
    """

    model: str = "policy"
    client: Any = Field(repr=False)
    tokenizer: Any = Field(repr=False)
    max_tokens: int
    tool_parser: str = "hermes"
    max_parallel_calls: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    max_prompt_tokens: int = 2**20
    template_options: dict[str, Any] = Field(default_factory=dict)
    _session: Session | None = PrivateAttr(default=None)

    @property
    def session(self) -> Session:
        """The recorded trajectory, with the policy that samples its turns."""
        if self._session is None:
            policy = Policy(
                server_manager=self.client,
                templates=Templates(self.tokenizer, self.template_options),
                parser=get_tool_parser(self.tool_parser, self.tokenizer),
                model=self.model,
                prompt_length=self.max_prompt_tokens,
                response_length=self.max_tokens,
                client_sampling="apply",
                most_calls=self.max_parallel_calls,
            )
            own = {"temperature": self.temperature, "top_p": self.top_p, "repetition_penalty": self.repetition_penalty}
            self._session = Session(policy, {"logprobs": True} | own | self.sampling_params)
        return self._session

    @property
    def _llm_type(self) -> str:
        return "verl"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model, which decides itself whether to call one."""
        if tool_choice not in (None, "auto"):
            raise ValueError(f"tool_choice={tool_choice!r}: must be auto: the model chooses its calls itself")
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise RuntimeError("the rollout servers answer asynchronously: call ainvoke, not invoke")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Sample the next turn; ``messages`` continue the messages of earlier turns.

        Raises: TrajectoryFullError; ValueError for messages that the model does not support.
        """
        body = {"messages": [openai_message(message) for message in messages], "stop": stop, **kwargs}
        try:
            answer = await self.session.chat(parse_chat(body))
        except RequestError as error:
            kind = TrajectoryFullError if error.code == FULL else ValueError
            raise kind(error.message) from error
        return ChatResult(generations=[ChatGeneration(message=self._message(answer))])

    def _message(self, answer: Answer) -> AIMessage:
        segment = next(each for each in self.session.segments if each.number == answer.place[0])
        output = segment.trajectory.output()
        trajectory = {
            "prompt_ids": output.prompt_ids,
            "response_ids": output.response_ids,
            "response_mask": output.response_mask,
            "response_logprobs": output.response_logprobs,
            "turns": turn_columns(output.turns),
            "metrics": output.metrics.model_dump(),
            "segments": len(self.session.segments),
            "number": segment.number,
        }
        calls: list[LangChainCall] = []
        broken: list[InvalidToolCall] = []
        for number, call in enumerate(answer.calls):
            name = answer.call_id(number)
            if call.error is None:
                calls.append(LangChainCall(name=call.name, args=json.loads(call.arguments), id=name))
            else:
                broken.append(InvalidToolCall(name=call.name, args=call.arguments, id=name, error=call.error))
        return AIMessage(
            content=answer.text,
            tool_calls=calls,
            invalid_tool_calls=broken,
            response_metadata={TRAJECTORY: trajectory, "finish_reason": answer.finish_reason},
        )


def openai_message(message: BaseMessage) -> dict[str, Any]:
    """Convert a LangChain message to the form of the OpenAI API, malformed tool calls included."""
    converted: Any = convert_to_openai_messages(message)
    written: dict[str, Any] = dict(converted)
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        broken = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.invalid_tool_calls
        ]
        written["tool_calls"] = sorted([*written.get("tool_calls", []), *broken], key=lambda call: str(call["id"]))
    return written


def convert_to_agent_output(messages: Sequence[BaseMessage], response_length: int) -> AgentLoopOutput:
    """Return the trajectory up to the last turn of the model; messages after that turn are left out.

    Args: ``response_length`` is the maximum number of tokens in the response.
    Raises: ValueError if no message comes from a ``ChatModel``.
    """
    found = [
        message for message in messages if isinstance(message, AIMessage) and TRAJECTORY in message.response_metadata
    ]
    if not found:
        raise ValueError("no message comes from a ChatModel: there is nothing to train")
    trajectory = found[-1].response_metadata[TRAJECTORY]
    log_probs = trajectory["response_logprobs"]
    return AgentLoopOutput(
        prompt_ids=trajectory["prompt_ids"],
        response_ids=trajectory["response_ids"][:response_length],
        response_mask=trajectory["response_mask"][:response_length],
        response_logprobs=None if log_probs is None else log_probs[:response_length],
        num_turns=1 + len(trajectory["turns"]),
        metrics=trajectory["metrics"],
        extra_fields={"segments": trajectory["segments"], TURNS_COLUMN: trajectory["turns"]},
    )


def segments_of(model: ChatModel, messages: Sequence[BaseMessage], response_length: int) -> list[AgentLoopOutput]:
    """Return all segments of a trajectory; the segment with the last turn of the model comes last.

    There are several if the graph rewrites earlier messages, or calls the model with separate conversations.

    Args: as in ``convert_to_agent_output``.
    """
    last = convert_to_agent_output(messages, response_length)
    ends = [message.response_metadata[TRAJECTORY] for message in messages if TRAJECTORY in message.response_metadata]
    segments = model.session.segments
    turns = [segment.trajectory.turns for segment in segments]
    shared = {"num_turns": 1 + sum(map(len, turns))}
    outputs = [
        segment.trajectory.output(
            **shared, extra_fields={"segments": len(segments), TURNS_COLUMN: turn_columns(segment.trajectory.turns)}
        )
        for segment in segments
        if segment.number != ends[-1]["number"]
    ]
    return [*outputs, last.model_copy(update=shared if outputs else {})]
