"""A tool on a server that speaks the Model Context Protocol."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from verl.base_config import BaseConfig, setting
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import OUTCOME, ToolError, ToolOutcome, ToolTimeout
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.mcp_client import McpError, McpServer, McpTimeout
from verl.tools.utils.running import RunningCalls
from verl.utils.class_files import read_options
from verl.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from mcp.types import ContentBlock

NO_TEXT = "The tool answered without text."


@dataclass
class McpToolConfig(BaseConfig):
    """``config`` of the tools of an item."""

    _is_closed: ClassVar[bool] = True

    rate_limit: float = setting(10.0, "calls in a second that a process starts on a server", above=0)
    timeout: float = setting(30.0, "seconds for a call", above=0)
    max_attempts: int = setting(10, "attempts to connect", at_least=1)
    retry_delay_s: float = setting(2.0, "delay between two attempts", at_least=0)


class MCPBaseTool(BaseTool):
    """Calls the tool of the same name on ``server``, which the reader of the tool file sets.

    A subclass can override ``_parse_tool_result``, which turns the server's answer into text and metrics.
    """

    server: McpServer | None = None

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.options = read_options(self, config, McpToolConfig)
        self._running = RunningCalls()

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Call the tool.

        Returns: its text and images, reward 0, and metrics. If the tool fails, the outcome is "error".

        Raises: ToolError if the server gives no answer.
        """
        if self.server is None:
            raise ToolError(f"the tool {self.name} has no server.")
        try:
            with self._running.call(instance_id):
                result = await self.server.call(self.name, parameters)
        except McpTimeout as error:
            raise ToolTimeout(str(error)) from error
        except McpError as error:
            raise ToolError(str(error)) from error
        text, metrics = self._parse_tool_result(result.content)
        if result.is_error:
            metrics = {**metrics, OUTCOME: ToolOutcome.ERROR}
        images = [_content(part.data) for part in result.content if part.type == "image"]
        return ToolResponse(text=text or (None if images else NO_TEXT), image=images or None), 0.0, metrics

    async def abort(self, instance_id: str) -> None:
        """Cancel the calls of an instance."""
        self._running.cancel(instance_id)

    def _parse_tool_result(self, content: "Sequence[ContentBlock]") -> tuple[str, JsonObject]:
        """Return text and metrics of the parts of an answer, each of which has a ``type`` and perhaps a ``text``."""
        return "".join(part.text for part in content if part.type == "text"), {}


def _content(data: str) -> bytes:
    """Return an encoded image; the agent loop decodes the image, as for other tools. Raises: ToolError."""
    try:
        return base64.b64decode(data)
    except ValueError as error:
        raise ToolError(f"the server answered with an image that is no base64: {error}") from error
