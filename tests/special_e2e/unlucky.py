"""Tools and servers that are slow, fail, hang and die, and loops for a model that does not call tools by itself."""

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, Conversation, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import ToolError
from verl.tools.schemas import ToolResponse
from verl.utils.faults import fault_point
from verl.workers.rollout.server import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMServer

FAILING, HANGING = 0.30, 0.05
"""Share of the calls of ``UnluckyTool`` that fail, and that hang."""
MOST_DELAY_S = 0.3
TOOL_FAULT_AT = 70
"""The call of ``SlowTool`` at which the fault ``tool`` fires: with 32 calls a step, in the third."""


@ToolParser.register("calls_with_its_text")
class CallsWithItsText(ToolParser):
    """Finds a call in every turn, whose argument is the text of the turn."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return no text and the call."""
        return "", [FunctionCall("luck", json.dumps({"text": text}))]


class UnluckyTool(BaseTool):
    """Fails or hangs at random, however often one asks."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Answer, if at all."""
        luck = random.random()
        if luck < FAILING:
            raise ToolError("the sandbox is full.")
        if luck < FAILING + HANGING:
            await asyncio.Event().wait()
        return ToolResponse(text="good"), 0.0, {}


class SlowTool(BaseTool):
    """Answers at random times what depends on the argument only."""

    calls = itertools.count(1)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Answer after a while."""
        await asyncio.sleep(random.random() * MOST_DELAY_S)
        if next(self.calls) == TOOL_FAULT_AT:
            fault_point("tool", rank=0)
        return ToolResponse(text=hashlib.sha256(parameters["text"].encode()).hexdigest()[:8]), 0.0, {}


@register("short")
class Short(ToolAgentLoop):
    """Ends a turn at every third token or so."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        return await super().run({**sampling_params, "stop_token_ids": list(range(90))}, **kwargs)


@register("strict")
class Strict(Short):
    """Fails with its tool, as loops of users do."""

    async def _process_tools(self, talk: Conversation) -> AgentState:
        state = await super()._process_tools(talk)
        (call,) = talk.trajectory.turns[-1].calls
        if call.outcome != "ok":
            raise OSError(f"the tool: {call.outcome}: {call.text}")
        return state


class SlowServer(vLLMServer):
    """Takes requests and gives answers at random times."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """Continue a prompt after a while."""
        await asyncio.sleep(random.random() * MOST_DELAY_S / 2)
        output = await super().generate(*args, **kwargs)
        await asyncio.sleep(random.random() * MOST_DELAY_S / 2)
        return output
