"""Turns that end soon and call tools, since a model with random weights does neither; and a tool that shows films.

Some trajectories come in several segments.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, turn_columns
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.schemas import ToolResponse

SIDE = 112


@ToolParser.register("always_calls")
class AlwaysCalls(ToolParser):
    """Finds a call of the calculator in every text."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return no text and the call."""
        return "", [FunctionCall("calculator", '{"expression": "6*7"}')]


@ToolParser.register("always_looks")
class AlwaysLooks(ToolParser):
    """Finds calls in most texts: of one or two regions of an image of ``SIDE`` pixels, or of a film."""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> tuple[str, list[FunctionCall]]:
        """Return no text, and calls that depend on it."""
        draw = random.Random(text)
        names = [tool["function"]["name"] for tool in tools]
        calls = []
        for _ in range(draw.choice((0, 1, 1, 2))):
            x, y = (draw.randint(0, SIDE - 28) for _ in range(2))
            box = [x, y, draw.randint(x + 28, SIDE), draw.randint(y + 28, SIDE)]
            name = draw.choice(names)
            calls.append(FunctionCall(name, json.dumps({} if name == "film" else {"bbox_2d": box})))
        return "", calls


class Film(BaseTool):
    """Answers with a film of four frames."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Return the film."""
        frames = [Image.new("RGB", (56, 56), (60 * number, 90, 0)) for number in range(4)]
        film = {"video": frames, "sample_fps": 2.0, "min_pixels": 56 * 56, "max_pixels": 56 * 56}
        return ToolResponse(text="A film.", video=[film]), None, {}


@register("whole_turns")
class WholeTurns(ToolAgentLoop):
    """Ends a turn at every third token or so."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        return await super().run({**sampling_params, "stop_token_ids": list(range(90))}, **kwargs)


@register("short_turns")
class ShortTurns(WholeTurns):
    """Cuts every other trajectory into a segment for each turn of the model."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the trajectory of a row."""
        output = await super().run(sampling_params, **kwargs)
        assert isinstance(output, AgentLoopOutput)
        return in_segments(output) if kwargs["extra_info"]["index"] % 2 else output


def in_segments(whole: AgentLoopOutput) -> list[AgentLoopOutput]:
    """Cut a trajectory before each later turn of the model: what came before becomes the prompt."""
    starts = [turn.start for turn in whole.turns if turn.role == "assistant"]
    segments = []
    for first, last in zip(starts, [*starts[1:], len(whole.response_ids)], strict=True):
        turns = [replace(turn, start=turn.start - first, end=turn.end - first) for turn in whole.turns]
        turns = [turn for turn in turns if turn.start >= 0 and turn.end <= last - first]
        assert whole.response_logprobs is not None
        update = {
            "prompt_ids": [*whole.prompt_ids, *whole.response_ids[:first]],
            "response_ids": whole.response_ids[first:last],
            "response_mask": whole.response_mask[first:last],
            "response_logprobs": whole.response_logprobs[first:last],
            "turns": turns,
            "extra_fields": whole.extra_fields | {TURNS_COLUMN: turn_columns(turns)},
        }
        segments.append(whole.model_copy(update=update))
    return segments
