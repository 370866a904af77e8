"""The base class of tools."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.errors import WrongInput
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.json_types import Json, JsonObject, mapping_at

Executed = tuple[ToolResponse, float, JsonObject]
"""The answer of a call, its reward, and its metrics."""


class BaseTool(ABC):
    """A tool that a model can call. One object serves all trajectories of a process, at the same time.

    The state of a trajectory is kept under an instance id, from ``create`` to ``release``.
    A call that cannot succeed raises ``ToolError`` of ``verl.tools.calls``, whose text the model reads.

    Args:
        config: ``config`` of the tool's item in the tool file.
        tool_schema: what the model is told about the tool; may be None if the class overrides
            ``get_openai_tool_schema``.
    """

    tool_schema: OpenAIFunctionToolSchema | None = None

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is None:
            raise WrongInput(f"{type(self).__qualname__} has no schema: write tool_schema")
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Json) -> tuple[str, ToolResponse]:
        """Begin an instance for a trajectory.

        Args: ``kwargs`` has ``create_kwargs``, which the row gives for this tool.

        Returns: its id, which is made if none is given, and what the model is told, often nothing.
        """
        return instance_id or str(uuid4()), ToolResponse()

    @abstractmethod
    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Run one call with the parameters that the model wrote.

        Returns: the answer, the reward of this call, and metrics, which may have ``outcome`` (``verl.tools.calls``).
        """

    async def calc_reward(self, instance_id: str, **kwargs: Json) -> float:
        """Return the reward of an instance, from all its calls."""
        return 0.0

    async def abort(self, instance_id: str) -> None:
        """Cancel the external work of an instance, whose trajectory was cancelled or has run out of time."""
        return None

    async def release(self, instance_id: str, **kwargs: Json) -> None:
        """End an instance."""
        return None


def created_with(name: str, kwargs: Mapping[str, Json]) -> Any:
    """Return an argument of ``create``, given as a keyword or in ``create_kwargs``; None if it is in neither."""
    value = kwargs.get(name)
    return mapping_at(kwargs, "create_kwargs").get(name) if value is None else value
