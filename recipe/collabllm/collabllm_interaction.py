"""A simulated user, played by a model on an OpenAI-compatible server."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.base_config import BaseConfig, setting
from verl.errors import WrongInput
from verl.interactions.base import Answered, Message
from verl.interactions.simulated_user_interaction import END_OF_CHAT, SimulatedUserInteraction
from verl.utils.class_files import read_options

INSTRUCTION = (
    "You play a person who works with an AI assistant; its messages are shown to you as those of the user. Write only "
    "this person's next message.\n\n"
    "{goal}\n\n"
    "Talk as people do: your first request leaves things out, so answer what the assistant asks, and give a detail "
    "when it becomes relevant, never everything at once. Do not do the assistant's work, and do not praise or thank at "
    "length. If an answer is wrong or is not what you want, say so. Write {end_of_chat}, and nothing else, as soon as "
    "you have what you want, or when the conversation leads nowhere."
)


@dataclass
class CollabLLMInteractionConfig(BaseConfig):
    """The node ``config`` of the interaction."""

    _is_closed: ClassVar[bool] = True

    user_model: str = setting("gpt-4o-mini", "name of the model that plays the user", empty=False)
    base_url: str = setting("https://api.openai.com/v1", "address of the server of this model")
    api_key: str = setting("", "bearer token; empty for none")
    num_retries: int = setting(3, "attempts per message", at_least=1)
    retry_delay_s: float = setting(1.0, "delay before the second attempt, doubled before each further one", at_least=0)
    timeout_s: float = setting(300.0, "time limit of a message, all attempts included", above=0)
    max_tokens: int = setting(512, "maximum number of tokens in a message", at_least=1)
    temperature: float = setting(1.0, "sampling temperature", at_least=0)
    max_concurrency: int = setting(32, "maximum number of concurrent requests in a process", at_least=1)
    enable_log: bool = setting(False, "print each conversation at its end")


class CollabLLMInteraction(SimulatedUserInteraction):
    """A simulated user who knows the whole task and reveals the parts that the assistant asks for.

    The task is ``single_turn_prompt`` of the row.

    The conversation ends when the user writes ``[[TERMINATE CHAT]]``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        given = read_options(self, config, CollabLLMInteractionConfig)
        same = ("base_url", "api_key", "retry_delay_s", "timeout_s", "max_tokens", "temperature", "max_concurrency")
        super().__init__(
            {name: given[name] for name in same}
            | {
                "name": config.get("name", "collabllm"),
                "model": given.user_model,
                "max_attempts": given.num_retries,
                "instruction": INSTRUCTION,
                "end_of_chat": END_OF_CHAT,
            }
        )
        self.prints = given.enable_log
        self._last: dict[str, list[Message]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Store the user's goal: the whole task (``single_turn_prompt``) and its kind (``task_desc``).

        Raises: WrongInput if the row has no ``single_turn_prompt``.
        """
        task = kwargs.get("single_turn_prompt")
        if not isinstance(task, str):
            key = "extra_info.interaction_kwargs.single_turn_prompt"
            raise WrongInput(f"a row has no task for the interaction {self.name}: write {key}, what the user wants")
        kind = kwargs.get("task_desc") or "a task"
        goal = f"The conversation is about {kind}. The person wants, without having said it all:\n{task}"
        return await super().start_interaction(instance_id, goal=goal)

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Any) -> Answered:
        """Return the next message of the user."""
        answered = await super().generate_response(instance_id, messages)
        if self.prints:
            self._last[instance_id] = [*messages, {"role": "user", "content": answered[1]}]
        return answered

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Print the conversation if ``enable_log`` is set, and drop it."""
        messages = self._last.pop(instance_id, None)
        if messages is not None:
            sys.stdout.write(f"conversation {instance_id}: {json.dumps(messages, ensure_ascii=False)}\n")
            sys.stdout.flush()
        await super().finalize_interaction(instance_id)
