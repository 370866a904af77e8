"""A user who is played by a second model, on an OpenAI-compatible server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.base_config import WrongInput, nearest
from verl.interactions.base import Answered, BaseInteraction, Message, text_of
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.concurrency import ConcurrencyLimit

END_OF_CHAT = "[[TERMINATE CHAT]]"
INSTRUCTION = (
    "You play a person who talks to an assistant; its messages are shown to you as those of the user. Stay in this "
    "role and write nothing but this person's next message. What the person wants: {goal}\n"
    "When the assistant has given it, or cannot, end with {end_of_chat}."
)
_ENDPOINT_KEYS = ("base_url", "model", "api_key", "timeout_s", "max_attempts", "retry_delay_s", "max_concurrency")
_SAMPLING_KEYS = ("temperature", "top_p", "max_tokens", "seed")
_OWN_KEYS = ("name", "instruction", "end_of_chat", "max_user_turns")
_SWAPPED = {"assistant": "user", "user": "assistant"}


@dataclass
class _Chat:
    instruction: str
    turns: int = 0


class SimulatedUserInteraction(BaseInteraction):
    """Asks a model for the next user message. A trajectory fails with ``EndpointError`` if that gives no answer.

    ``config`` has ``base_url`` and ``model``, and may have ``api_key``, ``timeout_s``, ``max_attempts``,
    ``retry_delay_s`` and ``max_concurrency`` of ``ChatEndpoint``; ``temperature`` (0), ``top_p``, ``max_tokens`` and
    ``seed``; ``instruction``, a text with ``{goal}`` and ``{end_of_chat}``; ``end_of_chat``, the text that ends the
    conversation; ``max_user_turns``. Rows give ``goal`` in ``interaction_kwargs``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        known = (*_ENDPOINT_KEYS, *_SAMPLING_KEYS, *_OWN_KEYS)
        for key in config:
            if key not in known:
                near = ", ".join(nearest(key, known)) or ", ".join(known)
                raise WrongInput(f"config.{key} is unknown: write {near}, or remove it")
        for key in ("base_url", "model"):
            if not config.get(key):
                raise WrongInput(f"config.{key} is missing: write the server and the model that play the user")
        sampling = {"temperature": 0.0, **{key: config[key] for key in _SAMPLING_KEYS if key in config}}
        given = {key: config[key] for key in _ENDPOINT_KEYS if key in config}
        self.endpoint = ChatEndpoint(**given, sampling=sampling)
        self.end_of_chat: str = config.get("end_of_chat", END_OF_CHAT)
        self.instruction: str = config.get("instruction", INSTRUCTION)
        if "{goal}" not in self.instruction:
            raise WrongInput("config.instruction has no {goal}: write it where the goal of a row belongs")
        self.max_user_turns: int | None = config.get("max_user_turns")
        self._limit = ConcurrencyLimit(self.endpoint.max_concurrency)
        self._chats: dict[str, _Chat] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Keep ``goal``, what the user wants, for a trajectory.

        Raises: WrongInput if the row has none.
        """
        goal = kwargs.get("goal")
        if not isinstance(goal, str):
            key = "extra_info.interaction_kwargs.goal"
            raise WrongInput(f"a row has no goal for the interaction {self.name}: write {key}, what the user wants")
        instance_id = await super().start_interaction(instance_id)
        # no `format`: the instruction and the goal are texts that may have other braces
        instruction = self.instruction.replace("{end_of_chat}", self.end_of_chat).replace("{goal}", goal)
        self._chats[instance_id] = _Chat(instruction)
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Any) -> Answered:
        """Return the next message of the user; the conversation ends at ``end_of_chat`` or after ``max_user_turns``."""
        chat = self._chats[instance_id]
        if self.max_user_turns is not None and chat.turns >= self.max_user_turns:
            return True, "", await self.calculate_score(instance_id), {"user_turns": chat.turns}
        async with self._limit.slot():
            answer = await self.endpoint.answer(self._seen_by_user(chat, messages))
        text, ended, _ = answer.partition(self.end_of_chat)
        if not text.strip() and not ended:
            raise EndpointError(f"{self.endpoint.base_url}: the model that plays the user wrote an empty message")
        chat.turns += 1
        return bool(ended), text.strip(), await self.calculate_score(instance_id), {"user_turns": chat.turns}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
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
