"""A simulated user who tells the model whether its answer to a GSM8K problem is right."""

from collections.abc import Sequence
from typing import TypedDict

from verl.errors import WrongInput
from verl.interactions.base import Answered, BaseInteraction, Message, last_text
from verl.utils.json_types import Json, JsonObject
from verl.utils.reward_score import gsm8k

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class _Question(TypedDict):
    response: str
    ground_truth: str
    reward: float


class Gsm8kInteraction(BaseInteraction):
    """Ends the conversation with score 1 at the right answer, a number after ``####``; else asks to try again.

    Subclasses read ``_instance_dict``: instance -> its ``ground_truth``, last ``response`` and ``reward``.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, _Question] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Keep ``ground_truth``, the right answer, for a trajectory.

        Raises: WrongInput if the row has none.
        """
        ground_truth = kwargs.get("ground_truth")
        if ground_truth is None:
            key = "extra_info.interaction_kwargs.ground_truth"
            raise WrongInput(f"a row has no right answer for the interaction {self.name}: write {key}")
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": str(ground_truth), "reward": 0.0}
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Say whether the last message of the model has the right answer."""
        question = self._instance_dict[instance_id]
        question["response"] = last_text(messages, "assistant") or ""
        question["reward"] = score = await self.calculate_score(instance_id)
        right = score == 1.0
        return right, RIGHT if right else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Json) -> float:
        """Return 1 if the last answer is right, else 0."""
        question = self._instance_dict[instance_id]
        return gsm8k.compute_score(question["response"], question["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """Forget the trajectory."""
        self._instance_dict.pop(instance_id, None)
