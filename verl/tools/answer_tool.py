"""A tool by which the model hands in an answer and learns whether it is right."""

import asyncio
from abc import abstractmethod
from typing import TypedDict

from verl.errors import WrongInput
from verl.tools.base_tool import BaseTool, Executed, created_with
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.json_types import Json, JsonObject

NO_IMPROVEMENT = -0.05
"""Reward of an answer that scores no better than the best one before."""


class _Kept(TypedDict):
    response: str
    ground_truth: Json
    reward: float


class AnswerTool(BaseTool):
    """Scores answers against the ``ground_truth`` that ``create`` gets.

    Subclasses read ``_instance_dict``: instance -> its ``ground_truth``, last ``response`` and best score, ``reward``.
    """

    default_name = ""
    default_description = ""

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, _Kept] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is not None:
            return self.tool_schema
        answer = {"type": "string", "description": "The answer to the question."}
        parameters = {"type": "object", "properties": {"answer": answer}, "required": ["answer"]}
        function = {"name": self.default_name, "description": self.default_description, "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    @abstractmethod
    def score(self, answer: str, ground_truth: Json) -> float:
        """Return the score of an answer."""

    async def create(self, instance_id: str | None = None, **kwargs: Json) -> tuple[str, ToolResponse]:
        """Keep ``ground_truth``, the right answer, for a trajectory.

        Raises: WrongInput if the row has none.
        """
        ground_truth = created_with("ground_truth", kwargs)
        if ground_truth is None:
            raise WrongInput(
                f"a row has no ground truth for {self.name}: write tools_kwargs.{self.name}.create_kwargs.ground_truth"
            )
        instance_id, response = await super().create(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, response

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Score ``answer``. The reward is 0 if it scores better than all before, else ``NO_IMPROVEMENT``."""
        kept = self._instance_dict[instance_id]
        kept["response"] = str(parameters.get("answer", ""))
        score = await self.calc_reward(instance_id)
        reward = 0.0 if score > kept["reward"] else NO_IMPROVEMENT
        kept["reward"] = max(kept["reward"], score)
        return ToolResponse(text=f"The answer {kept['response']!r} has the score {score:g}."), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Json) -> float:
        """Return the score of the last answer, 0 without one."""
        kept = self._instance_dict[instance_id]
        if not kept["response"]:
            return 0.0
        return await asyncio.to_thread(self.score, kept["response"], kept["ground_truth"])

    async def release(self, instance_id: str, **kwargs: Json) -> None:
        """Forget the instance."""
        self._instance_dict.pop(instance_id, None)
