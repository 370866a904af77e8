"""Turns that end soon and call a tool each, since a model with random weights neither ends nor calls."""

from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("always_calls")
class AlwaysCalls(ToolParser):
    """Finds a call of the calculator in every text."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return no text and the call."""
        return "", [FunctionCall("calculator", '{"expression": "6*7"}')]


@register("short_turns")
class ShortTurns(ToolAgentLoop):
    """Ends a turn at every third token or so."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        return await super().run({**sampling_params, "stop_token_ids": list(range(90))}, **kwargs)
