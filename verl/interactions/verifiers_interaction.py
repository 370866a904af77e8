"""Environments of the package ``verifiers`` (0.1) as interactions: they answer, end and score the conversation.

The environment runs its own rollout. Its model client is verl's: the client returns the messages that the policy has
sampled, and the environment's next messages are the answer to the policy. Environments whose tools the model calls
natively, and rubrics that compare the samples of a prompt, are refused. From verifiers 0.4 on environments drive the
model over HTTP.
"""

import asyncio
import functools
import importlib.metadata
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Required, TypedDict, TypeVar

from pydantic import BaseModel

from verl.base_config import BaseConfig, Violation, one_line, setting
from verl.errors import WrongInput
from verl.interactions.base import Answered, BaseInteraction, Message, last_text, text_of
from verl.interactions.environment_interaction import load_factory
from verl.utils.class_files import read_options
from verl.utils.import_utils import has_module
from verl.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from verifiers.clients import Client

T = TypeVar("T")

_CAN_BE_USED = "0.1."
_INPUT = ("prompt", "answer", "info", "example_id")
MODEL = "policy"


@dataclass
class VerifiersConfig(BaseConfig):
    """``config`` of the interaction."""

    _is_closed: ClassVar[bool] = True

    environment: str | None = setting(None, "id of an installed environment, for verifiers.load_environment")
    factory: str | None = setting(None, "dotted name of a function that makes the environment, instead of its id")
    arguments: dict[str, Any] = setting({}, "arguments of the environment")

    def rules(self) -> Iterator[Violation]:
        """Yield the faults of the names of environments."""
        if (self.environment is None) == (self.factory is None):
            text = "write either environment, the id of an installed one, or factory, the dotted name of a function"
            yield Violation("environment", self.environment, text, others=("factory",))


VerifiersMessage = Mapping[str, Json] | BaseModel


class _State(TypedDict, total=False):
    """The fields of a rollout's state that the interaction reads; the environment may add others."""

    reward: Required[float]
    metrics: Required[dict[str, Json] | None]
    final_env_response: str | Sequence[VerifiersMessage] | None
    error: BaseException | None


class _Rubric(Protocol):
    def score_rollout(self, state: _State) -> Awaitable[None]: ...


class _Environment(Protocol):
    @property
    def rubric(self) -> _Rubric: ...

    def rollout(
        self, input: JsonObject, client: "Client", model: str, sampling_args: JsonObject
    ) -> Coroutine[None, None, _State]: ...


@dataclass
class _Rollout:
    """A rollout of the environment that waits for messages of the policy.

    ``asked`` holds the conversations that the environment wants continued, ``sampled`` the messages of the policy.
    """

    asked: "asyncio.Queue[list[JsonObject]]" = field(default_factory=asyncio.Queue)
    sampled: "asyncio.Queue[str]" = field(default_factory=asyncio.Queue)
    task: "asyncio.Task[_State] | None" = None
    seen: int = 0
    score: float = 0.0


class VerifiersInteraction(BaseInteraction):
    """Lets an environment of verifiers reply. ``interaction_kwargs.input`` of a row is a row of its data set."""

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self.options = read_options(self, config, VerifiersConfig)
        self.environment = _load(self.options)
        name = self.options.environment or self.options.factory
        if getattr(self.environment, "tool_defs", None):
            raise WrongInput(f"config.environment={name}: has tools, which the model calls natively: use verl.tools")
        if getattr(self.environment, "requires_group_rollouts", False):
            raise WrongInput(f"config.environment={name}: scores groups of samples together: use another rubric")
        self._client = functools.cache(_client_class)
        self._rollouts: dict[str, _Rollout] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Start the rollout of ``input`` and wait until the environment wants the first message of the policy.

        Raises: WrongInput if the row has no input.
        """
        given = kwargs.get("input")
        if not isinstance(given, Mapping) or not given.get("prompt"):
            key = "extra_info.interaction_kwargs.input"
            raise WrongInput(f"a row has no input for the interaction {self.name}: write {key}, with prompt and answer")
        rollout = _Rollout()
        wanted = {"example_id": 0, **{key: given[key] for key in _INPUT if key in given}}
        client = self._client()(rollout)
        rollout.task = asyncio.create_task(self.environment.rollout(wanted, client, MODEL, {}))
        instance_id = await super().start_interaction(instance_id)
        self._rollouts[instance_id] = rollout
        if await self._asks(rollout) is None:
            raise RuntimeError(f"interaction {self.name}: the environment ended before the first message")
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Hand in the last message of the policy; the conversation ends when the rollout does."""
        rollout = self._rollouts[instance_id]
        assert rollout.task is not None
        if rollout.task.done():
            return True, "", 0.0, {}
        rollout.sampled.put_nowait(last_text(messages, "assistant") or "")
        text = await self._asks(rollout)
        if text is not None:
            return False, text, 0.0, {}
        state = rollout.task.result()
        await self.environment.rubric.score_rollout(state)
        rollout.score = float(state["reward"])
        final = state.get("final_env_response") or ()
        text = final if isinstance(final, str) else "\n".join(text_of(_plain(message)) for message in final)
        return True, text, rollout.score, dict(state["metrics"] or {})

    async def calculate_score(self, instance_id: str, **kwargs: Json) -> float:
        """Return the score of the rollout, 0 before its end."""
        return self._rollouts[instance_id].score

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """End the rollout."""
        rollout = self._rollouts.pop(instance_id, None)
        if rollout is not None and rollout.task is not None:
            rollout.task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await rollout.task

    async def _asks(self, rollout: _Rollout) -> str | None:
        """Return the messages that the environment adds before the policy's next one; None if it has ended.

        Raises: RuntimeError if it failed.
        """
        assert rollout.task is not None
        asked = asyncio.ensure_future(rollout.asked.get())
        try:
            await asyncio.wait([asked, rollout.task], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                messages = asked.result()
                added = messages[rollout.seen :]
                rollout.seen = len(messages) + 1  # with the message that the policy now samples
                return "\n".join(text_of(message) for message in added)
        finally:
            asked.cancel()
        error = rollout.task.exception() or rollout.task.result().get("error")
        if error is not None:
            raise RuntimeError(f"interaction {self.name}: {one_line(repr(error))}")
        return None


def _load(options: VerifiersConfig) -> _Environment:
    """Return the environment.

    Raises: WrongInput if it cannot be made.
    """
    if not has_module("verifiers"):
        raise WrongInput("config.environment: the package verifiers is not installed: pip install 'verifiers<0.2'")
    version = importlib.metadata.version("verifiers")
    if not version.startswith(_CAN_BE_USED):
        raise WrongInput(f"config.environment: verifiers {version} has another interface: pip install 'verifiers<0.2'")
    import verifiers

    if options.factory is not None:
        factory: Callable[..., _Environment] = load_factory(options.factory)
        return factory(**options.arguments)
    made: _Environment = verifiers.load_environment(options.environment, **options.arguments)
    return made


def _client_class() -> "Callable[[_Rollout], Client]":
    """Return the ``verifiers`` client class through which an environment gets the policy's messages.

    Only this function and ``_load`` import verifiers.
    """
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class PolicyClient(Client):
        """Asks a rollout for the next message."""

        def __init__(self, rollout: _Rollout) -> None:
            super().__init__(rollout)

        async def get_response(
            self, prompt: Sequence[VerifiersMessage], model: str, *args: Json, **kwargs: Json
        ) -> Response:
            """Return the message that the policy samples."""
            self.client.asked.put_nowait([_plain(message) for message in prompt])
            text = await self.client.sampled.get()
            message = ResponseMessage(role="assistant", content=text, finish_reason="stop", is_truncated=False)
            return Response(id="policy", created=0, model=model, message=message)

        def setup_client(self, config: _Rollout) -> _Rollout:
            """Return the client."""
            return config

        async def to_native_tool(self, tool: T) -> T:
            """Return a tool as it is."""
            return tool

        async def to_native_prompt(self, messages: T) -> tuple[T, JsonObject]:
            """Return messages as they are."""
            return messages, {}

        async def get_native_response(
            self, prompt: Sequence[VerifiersMessage], model: str, *args: Json, **kwargs: Json
        ) -> Response:
            """Answer like ``get_response``."""
            return await self.get_response(prompt, model)

        async def raise_from_native_response(self, response: Response) -> None:
            """Accept every message."""

        async def from_native_response(self, response: T) -> T:
            """Return a response as it is."""
            return response

        async def close(self) -> None:
            """Close nothing."""

    return PolicyClient


def _plain(message: VerifiersMessage) -> JsonObject:
    """Return a message of verifiers, a model of pydantic or a dict, as a dict."""
    return dict(message) if isinstance(message, Mapping) else message.model_dump()
