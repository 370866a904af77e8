"""The schema of a tool, the calls of the model, and the answers to them.

The schemas are those of OpenAI's function calling. Unknown fields, such as ``items`` of an array, are kept, so that the
model sees the schema as the author of the tool wrote it.
"""

import json
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from verl.utils.json_types import JsonObject

T = TypeVar("T")


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """One parameter of a function. Its type is missing if ``anyOf`` or the like describes it."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a function, a JSON schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Open):
    """A function: its name, description and parameters."""

    name: str = Field(min_length=1)
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool, as it is shown to the model."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the model wrote it: its arguments are still text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments by name."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def from_openai_function_parsed_schema(cls, parsed: OpenAIFunctionParsedSchema) -> tuple[Self, bool]:
        """Return the call, and whether its arguments were no JSON object; they are empty then."""
        arguments = decode_arguments(parsed.arguments)
        return cls(name=parsed.name, arguments=arguments or {}), arguments is None


class OpenAIFunctionToolCall(BaseModel):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """The answer of a tool: text, images and videos, each optional.

    Raises: ValueError if images or videos are not in a list.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_list(cls, value: T) -> T:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list, got {type(value).__name__}: write [value] for a single one")
        return value

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Whether there is text and nothing else in it."""
        return bool(self.text) and not self.image and not self.video

    def as_content(self) -> str | list[dict[str, str]]:
        """Return the answer as the content of a message: images, videos, then text."""
        kinds = ["image"] * len(self.image or ()) + ["video"] * len(self.video or ())
        parts = [{"type": kind} for kind in kinds]
        if not parts:
            return self.text or ""
        return [*parts, {"type": "text", "text": self.text}] if self.text else parts


class Message(BaseModel):
    """A message; further fields, such as ``name`` and ``tool_call_id``, are kept for templates that write them."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | dict[str, Any] | list[dict[str, Any]] | ToolResponse | None = None
    tool_calls: list[OpenAIFunctionToolCall | dict[str, Any]] | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message = self.model_dump()
        if isinstance(self.content, ToolResponse):
            message["content"] = self.content.as_content()
        elif isinstance(self.content, dict):
            message["content"] = [self.content]
        return message


def decode_arguments(text: str) -> JsonObject | None:
    """Return the arguments that a model wrote as JSON; None if they are no JSON object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
