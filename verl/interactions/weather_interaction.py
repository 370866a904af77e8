"""A simulated user who asks for the weather and expects a tool call."""

from collections.abc import Sequence

from verl.interactions.base import Answered, BaseInteraction, Message, last_text
from verl.utils.json_types import Json, JsonObject

THANKS = "Thank you for your weather query!"
NO_CALL = "Please use the weather tool to get the weather information."


class WeatherInteraction(BaseInteraction):
    """Ends the conversation with score 1 if it has the answer of a tool, else 0."""

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Begin with score 0."""
        instance_id = await super().start_interaction(instance_id)
        self._scores[instance_id] = 0.0
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Look for the answer of a tool."""
        called = last_text(messages, "tool") is not None
        self._scores[instance_id] = float(called)
        return True, THANKS if called else NO_CALL, await self.calculate_score(instance_id), {}

    async def calculate_score(self, instance_id: str, **kwargs: Json) -> float:
        """Return the score of the last turn."""
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """Forget the trajectory."""
        self._scores.pop(instance_id, None)
