"""The base class of interactions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl.utils.json_types import Json, JsonObject

Message = Mapping[str, Any]
Answered = tuple[bool, str, float, JsonObject]
"""Whether the conversation ends here, the text of the next user message, the score of this turn, and further info."""


class BaseInteraction(ABC):
    """Answers the model as a user would. One object serves all trajectories of a process, at the same time.

    The state of a trajectory is kept under an instance id, from ``start_interaction`` to ``finalize_interaction``.

    Args: ``config`` of the interaction's item in the file, and its ``name``.
    """

    def __init__(self, config: JsonObject) -> None:
        self.config = config
        self.name = str(config["name"]) if "name" in config else "interaction_agent"

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Begin the interaction of a trajectory and return its id, which is made if none is given.

        Args: ``kwargs`` is ``interaction_kwargs`` of the row.
        """
        return instance_id or str(uuid4())

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Answer the conversation, whose last message is the model's.

        Returns: whether it ends here (the text is not shown to the model then), the text of the next user message, the
            score of this turn, and further info.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Json) -> float:
        """Return the score of the last turn."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """End the interaction of a trajectory."""
        return None


def text_of(message: Message) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def last_text(messages: Sequence[Message], role: str) -> str | None:
    """Return the text of the last message of a role; None if there is none."""
    return next((text_of(message) for message in reversed(messages) if message.get("role") == role), None)
