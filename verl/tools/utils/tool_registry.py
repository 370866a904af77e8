"""Make the tools that a file lists."""

from typing import Any

from pydantic import ValidationError

from verl.base_config import WrongInput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.class_files import ClassItem, build, import_class, read_class_items

EXAMPLE = "class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}"
NATIVE = "native"


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Make the tools of a file.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    tools: list[BaseTool] = []
    places: dict[str, str] = {}
    for item in read_tools_file(tools_config_file):
        made = [_native_tool(item)]
        for tool in made:
            if tool.name in places:
                raise WrongInput(
                    f"{item.where}: a tool is already named {tool.name!r}, by {places[tool.name]}: rename one of them"
                )
            places[tool.name] = item.where
        tools += made
    return tools


def read_tools_file(path: str) -> list[ClassItem]:
    """Read and check a file of tools without importing their classes.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    items = read_class_items(path, "tools", EXAMPLE, ("tool_schema",))
    for item in items:
        kind = item.config.get("type", NATIVE)
        if kind != NATIVE:
            raise WrongInput(f"{item.where}.config.type={kind!r}: write native")
        schema_of(item)
    return items


def schema_of(item: ClassItem) -> OpenAIFunctionToolSchema | None:
    """Return the schema that an item has; None if its class supplies it.

    Raises: WrongInput naming the key inside the schema.
    """
    written: Any = item.rest.get("tool_schema")
    if written is None:
        return None
    try:
        return OpenAIFunctionToolSchema.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["tool_schema", *map(str, first["loc"])])
        raise WrongInput(
            f"{item.where}.{place}: {first['msg']}: write a function as OpenAI describes it, with type: function and "
            "function: {name, description, parameters: {type: object, properties, required}}"
        ) from None


def _native_tool(item: ClassItem) -> BaseTool:
    schema = schema_of(item)
    tool_class = import_class(item, BaseTool)  # type: ignore[type-abstract]
    return build(item, lambda: tool_class(item.config, schema))
