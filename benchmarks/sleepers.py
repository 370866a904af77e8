"""The agent loop of ``agent_loops.py concurrent``: short turns, each of which calls a tool that sleeps.

A model with random weights neither ends its turns nor calls tools. Therefore this loop ends a turn at about every tenth
token, and its parser finds a tool call in every text.
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
"""The tokens that end a turn: a tenth of the vocabulary."""


class SleepTool(BaseTool):
    """A tool that answers after ``least_s`` to ``most_s`` seconds, like a remote sandbox."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the prompt."""
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": "sleep", "description": "Wait.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Sleep, then answer."""
        await asyncio.sleep(random.uniform(self.config["least_s"], self.config["most_s"]))
        return ToolResponse(text="awake"), 0.0, {}


@ToolParser.register("sleepers")
class CallsAlways(ToolParser):
    """A parser that finds a call of the tool in every text."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return an empty text and the tool call."""
        return "", [FunctionCall("sleep", "{}")]


@register("sleepers")
class Sleepers(ToolAgentLoop):
    """An agent loop whose turns end at about every tenth token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run a row and return its trajectory."""
        return await super().run({**sampling_params, "stop_token_ids": ENDS}, **kwargs)
