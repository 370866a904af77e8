"""A user who is played by a second model, on an OpenAI-compatible server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl.base_config import BaseConfig, Violation, setting
from verl.errors import WrongInput
from verl.interactions.base import Answered, BaseInteraction, Message, text_of
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.class_files import read_options
from verl.utils.concurrency import ConcurrencyLimit
from verl.utils.http_client import url_problem
from verl.utils.json_types import Json, JsonObject

END_OF_CHAT = "[[TERMINATE CHAT]]"
INSTRUCTION = (
    "You play a person who talks to an assistant; its messages are shown to you as those of the user. Stay in this "
    "role and write nothing but this person's next message. What the person wants: {goal}\n"
    "When the assistant has given it, or cannot, end with {end_of_chat}."
)
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")
_SWAPPED = {"assistant": "user", "user": "assistant"}


@dataclass
class SimulatedUserConfig(BaseConfig):
    """``config`` of the interaction."""

    _is_closed: ClassVar[bool] = True

    base_url: str = setting("", "address of the server", hint="write the server that plays the user")
    model: str = setting("", "name of the model", empty=False, hint="write the model that plays the user")
    api_key: str = setting("", "bearer token; empty for none")
    timeout_s: float = setting(300.0, "seconds for one message, all attempts included", above=0)
    max_attempts: int = setting(3, "attempts", at_least=1)
    retry_delay_s: float = setting(1.0, "delay before the second attempt; it doubles for each further one", at_least=0)
    max_concurrency: int = setting(32, "requests of a process at once", at_least=1)
    temperature: float = setting(0.0, "sampling temperature", at_least=0)
    top_p: float | None = setting(None, "nucleus of the sampling", above=0, at_most=1)
    max_tokens: int | None = setting(None, "most tokens of a message", at_least=1)
    seed: int | None = setting(None, "seed of the sampling")
    instruction: str = setting(INSTRUCTION, "what the model is told, with {goal} and {end_of_chat}")
    end_of_chat: str = setting(END_OF_CHAT, "text that ends the conversation", empty=False)
    max_user_turns: int | None = setting(None, "messages of the user", at_least=1)

    def rules(self) -> Iterator[Violation]:
        """Yield the faults of the interaction's settings."""
        problem = url_problem(self.base_url)
        if problem is not None:
            yield Violation("base_url", self.base_url, problem)
        if "{goal}" not in self.instruction:
            yield Violation("instruction", self.instruction, "has no {goal}: write it where the goal of a row belongs")


@dataclass
class _Chat:
    instruction: str
    turns: int = 0


class SimulatedUserInteraction(BaseInteraction):
    """Asks a model for the next user message. A trajectory fails with ``EndpointError`` without an answer.

    Rows give ``goal``, what the user wants, in ``interaction_kwargs``.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self.options = read_options(self, config, SimulatedUserConfig)
        sampling = {key: self.options[key] for key in _SAMPLING if self.options[key] is not None}
        self.endpoint = ChatEndpoint(
            self.options.base_url,
            self.options.model,
            self.options.api_key,
            sampling,
            self.options.timeout_s,
            self.options.max_attempts,
            self.options.retry_delay_s,
        )
        self._limit = ConcurrencyLimit(self.options.max_concurrency)
        self._chats: dict[str, _Chat] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Keep ``goal``, the wish of the user, for a trajectory.

        Raises: WrongInput if the row has none.
        """
        goal = kwargs.get("goal")
        if not isinstance(goal, str):
            key = "extra_info.interaction_kwargs.goal"
            raise WrongInput(f"a row has no goal for the interaction {self.name}: write {key}, what the user wants")
        instance_id = await super().start_interaction(instance_id)
        # no `format`: the instruction and the goal are texts that may have other braces
        instruction = self.options.instruction.replace("{end_of_chat}", self.options.end_of_chat).replace(
            "{goal}", goal
        )
        self._chats[instance_id] = _Chat(instruction)
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Return the next message of the user; the conversation ends at ``end_of_chat`` or after ``max_user_turns``."""
        chat = self._chats[instance_id]
        if self.options.max_user_turns is not None and chat.turns >= self.options.max_user_turns:
            return True, "", await self.calculate_score(instance_id), {"user_turns": chat.turns}
        async with self._limit.slot():
            answer = await self.endpoint.answer(self._seen_by_user(chat, messages))
        text, ended, _ = answer.partition(self.options.end_of_chat)
        if not text.strip() and not ended:
            raise EndpointError(f"{self.endpoint.base_url}: the model that plays the user wrote an empty message")
        chat.turns += 1
        return bool(ended), text.strip(), await self.calculate_score(instance_id), {"user_turns": chat.turns}

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """Forget the trajectory."""
        self._chats.pop(instance_id, None)

    @staticmethod
    def _seen_by_user(chat: _Chat, messages: Sequence[Message]) -> list[Mapping[str, str]]:
        """Return the conversation from the other side: no system message, no tools, roles swapped."""
        seen = [
            {"role": _SWAPPED[message["role"]], "content": text_of(message)}
            for message in messages
            if message["role"] in _SWAPPED and text_of(message)
        ]
        return [{"role": "system", "content": chat.instruction}, *seen]
