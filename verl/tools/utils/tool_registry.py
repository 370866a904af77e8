"""Make the tools that a file lists."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar, Unpack

from pydantic import ValidationError

from verl.errors import WrongInput
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tools
from verl.tools.mcp_base_tool import MCPBaseTool, McpToolConfig
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.utils.mcp_client import McpError, McpLimits, McpServer, read_servers, require_mcp
from verl.utils.class_files import ClassItem, build, import_class, read_class_items, read_options
from verl.utils.failures import settle
from verl.utils.json_types import Json, JsonObject

T = TypeVar("T")

EXAMPLE = "class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}"
NATIVE = "native"
MCP = "mcp"
_MCP_KEYS = ("mcp_servers_config_path", "tool_selected_list")
_MCP_WANTED = "write mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}"


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Make the tools of a file.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    tools: list[BaseTool] = []
    places: dict[str, str] = {}
    for item in read_tools_file(tools_config_file):
        made = _mcp_tools(item) if _kind_of(item) == MCP else [_native_tool(item)]
        for tool in made:
            if tool.name in places:
                raise WrongInput(
                    f"{item.where}: a tool is already named {tool.name!r}, by {places[tool.name]}: rename one of them"
                )
            places[tool.name] = item.where
        tools += made
    return tools


def tools_of(turns: Mapping[str, Json]) -> list[BaseTool]:
    """Make the tools that ``rollout.multi_turn`` names: those of a file of tools, and of a file of functions.

    Raises: WrongInput naming the file, and a name that both have.
    """
    path = turns.get("tool_config_path")
    functions = turns.get("function_tool_path")
    listed = initialize_tools_from_config(str(path)) if path else []
    plain = function_tools(str(functions)) if functions else []
    twice = sorted({tool.name for tool in listed} & {tool.name for tool in plain})
    if twice:
        raise WrongInput(f"{functions}: {', '.join(twice)}: {path} has a tool of that name: rename one of them")
    return [*listed, *plain]


def read_tools_file(path: str) -> list[ClassItem]:
    """Read and check a file of tools without importing their classes.

    Raises: WrongInput naming the file, the item and the key, and what to write.
    """
    items = read_class_items(path, "tools", EXAMPLE, ("tool_schema", "mcp"))
    for item in items:
        if _kind_of(item) == MCP:
            _servers_of(item)
        elif item.rest.get("mcp") is not None:
            raise WrongInput(f"{item.where}.config.type={NATIVE!r}: write mcp, or remove the key mcp")
        else:
            schema_of(item)
    return items


def _kind_of(item: ClassItem) -> str:
    """Return whether an item makes a native tool or those of MCP servers.

    Raises: WrongInput for another type.
    """
    kind = item.config["type"] if "type" in item.config else NATIVE
    if kind not in (NATIVE, MCP):
        raise WrongInput(f"{item.where}.config.type={kind!r}: write native or mcp")
    return str(kind)


def schema_of(item: ClassItem) -> OpenAIFunctionToolSchema | None:
    """Return the schema that an item has; None if its class supplies it.

    Raises: WrongInput naming the key inside the schema.
    """
    written = item.rest.get("tool_schema")
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


def _mcp_tools(item: ClassItem) -> list[BaseTool]:
    """Make a tool for each one on the servers of an item, or only for the names in ``tool_selected_list``."""
    tool_class = import_class(item, MCPBaseTool)
    options = build(item, lambda: read_options(None, _own_options(item), McpToolConfig))
    servers = _servers_of(
        item,
        rate_limit=options.rate_limit,
        timeout_s=options.timeout,
        max_attempts=options.max_attempts,
        retry_delay_s=options.retry_delay_s,
    )
    try:
        listed = _run_apart(_list_tools(servers))
    except McpError as error:
        raise WrongInput(f"{item.where}: {error}: start the server, or correct its address") from error
    selected = item.rest["mcp"].get("tool_selected_list")
    known = [schema.function.name for _, schema in listed]
    for name in selected or ():
        if name not in known:
            raise WrongInput(
                f"{item.where}.mcp.tool_selected_list: no server has a tool {name!r}: write any of {', '.join(known)}"
            )
    tools: list[BaseTool] = []
    for server, schema in listed:
        if selected is None or schema.function.name in selected:
            tool = build(item, lambda given=schema: tool_class(item.config, given))  # type: ignore[misc]
            tool.server = server
            tools.append(tool)
    if not tools:
        raise WrongInput(f"{item.where}.mcp: its servers have no tools: correct mcp_servers_config_path")
    return tools


def _own_options(item: ClassItem) -> JsonObject:
    """Return the keys of ``config`` that concern servers; a user's class may have further keys."""
    names = list(McpToolConfig())
    return {key: value for key, value in item.config.items() if key in names}


def _servers_of(item: ClassItem, **limits: Unpack[McpLimits]) -> list[McpServer]:
    """Return the servers of an item.

    Raises: WrongInput naming the file and the key.
    """
    node = item.rest.get("mcp")
    if not isinstance(node, dict) or not isinstance(node.get("mcp_servers_config_path"), str):
        raise WrongInput(f"{item.where}.mcp: has no mcp_servers_config_path: {_MCP_WANTED}")
    for key in node:
        if key not in _MCP_KEYS:
            raise WrongInput(f"{item.where}.mcp: the key {key!r} is unknown: {_MCP_WANTED}")
    selected = node.get("tool_selected_list")
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        raise WrongInput(f"{item.where}.mcp.tool_selected_list={selected!r}: write a list of names of tools")
    if item.rest.get("tool_schema") is not None:
        raise WrongInput(f"{item.where}.tool_schema: the server describes its tools: remove it")
    try:
        require_mcp()
        return read_servers(node["mcp_servers_config_path"], **limits)
    except WrongInput as error:
        raise WrongInput(f"{item.where}.mcp: {error}") from error


async def _list_tools(servers: list[McpServer]) -> list[tuple[McpServer, OpenAIFunctionToolSchema]]:
    listed = await asyncio.gather(*(server.schemas() for server in servers))
    return [(server, schema) for server, schemas in zip(servers, listed, strict=True) for schema in schemas]


def _run_apart(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine in a thread, since the caller may be inside an event loop itself."""
    outcome: Future[T] = Future()
    thread = threading.Thread(target=settle, args=(outcome, partial(asyncio.run, work)), name="list-tools")
    thread.start()
    return outcome.result()
