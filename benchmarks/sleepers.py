"""Turns that end soon and call a tool each, which sleeps: the trajectories of ``agent_loops.py concurrent``.

A model with random weights neither ends its turns nor calls tools, so the loop ends a turn at about every tenth token
and the parser finds a call in every text.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

ENDS = list(range(0, 256, 10))
"""Tokens that end a turn, a tenth of the vocabulary."""


class SleepTool(BaseTool):
    """Answers after ``least_s`` to ``most_s`` seconds, as a remote sandbox would."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return what the model is told about the tool."""
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": "sleep", "description": "Wait.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Wait and answer."""
        await asyncio.sleep(random.uniform(self.config["least_s"], self.config["most_s"]))
        return ToolResponse(text="awake"), 0.0, {}


@ToolParser.register("sleepers")
class CallsAlways(ToolParser):
    """Finds a call of the tool in every text."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return no text and the call."""
        return "", [FunctionCall("sleep", "{}")]


@register("sleepers")
class Sleepers(ToolAgentLoop):
    """Ends a turn at about every tenth token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        return await super().run({**sampling_params, "stop_token_ids": ENDS}, **kwargs)
