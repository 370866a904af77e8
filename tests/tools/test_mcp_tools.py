"""Tools on a real server that speaks the Model Context Protocol over HTTP, behind a token."""

import asyncio
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import wait_until
from verl.base_config import WrongInput
from verl.tools.base_tool import BaseTool
from verl.tools.calls import CallResult, execute_call
from verl.tools.utils.tool_registry import initialize_tools_from_config, read_tools_file
from verl.utils.dataset.vision_utils import load_image

pytest.importorskip("mcp")
TOKEN = "secret"
BASE = "verl.tools.mcp_base_tool.MCPBaseTool"


@dataclass
class Served:
    """The address of the server, what happened in it, and how many requests it still breaks off."""

    url: str = ""
    hanging: int = 0
    cancelled: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    failing: int = 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with tools that answer, fail and hang."""
    import uvicorn
    from mcp.server.mcpserver import Image, MCPServer
    from PIL import Image as Pictures

    found = Served()
    server = MCPServer("tests", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        """Add two numbers."""
        found.starts.append(time.monotonic())
        return str(a + b)

    @server.tool()
    def search(query: str) -> str:
        """Search."""
        results = [{"title": "T", "url": "http://x", "content": f"about {query}"}, {"title": "U", "content": "c"}]
        return json.dumps({"query": query, "results": results})

    @server.tool()
    def picture() -> Image:
        """Draw."""
        buffer = io.BytesIO()
        Pictures.new("RGB", (3, 2), (255, 0, 0)).save(buffer, "PNG")
        return Image(data=buffer.getvalue(), format="png")

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("broken")

    @server.tool()
    async def hang() -> str:
        """Hang."""
        found.hanging += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            found.cancelled.append("hang")
            raise
        return "late"

    application = server.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        status = None
        if scope["type"] == "http":
            if dict(scope["headers"]).get(b"authorization") != f"Bearer {TOKEN}".encode():
                status = 401
            elif found.failing:
                found.failing -= 1
                status = 503
        if status is None:
            await application(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        found.url = f"http://127.0.0.1:{port.getsockname()[1]}/mcp"
        runner = uvicorn.Server(uvicorn.Config(guarded, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(runner.serve([port])), daemon=True)
        thread.start()
        while not runner.started:
            time.sleep(0.01)
        logging.disable(logging.CRITICAL)  # the server logs every request
        yield found
        logging.disable(logging.NOTSET)
        runner.should_exit = True
        thread.join(10)


def write(folder: Path, servers: Any, class_name: str = BASE, selected: Any = None, **config: Any) -> str:
    """Write a tool file and its file of servers; return the path of the first."""
    (folder / "servers.json").write_text(servers if isinstance(servers, str) else json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": str(folder / "servers.json")}
    if selected is not None:
        mcp["tool_selected_list"] = selected
    config = {"type": "mcp", "retry_delay_s": 0.01, "rate_limit": 1000, **config}
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": class_name, "config": config, "mcp": mcp}]}))
    return str(path)


def tools_of(folder: Path, served: Served, **options: Any) -> dict[str, BaseTool]:
    path = write(folder, {"tests": {"url": served.url, "auth_token": TOKEN}}, **options)

    async def within_a_loop() -> list[BaseTool]:  # as an agent loop worker does
        return initialize_tools_from_config(path)

    return {tool.name: tool for tool in asyncio.run(within_a_loop())}


def call(tool: BaseTool, arguments: dict[str, Any], timeout_s: float | None = None) -> CallResult:
    return asyncio.run(execute_call(tool, "i", arguments, timeout_s))


def test_tools_are_those_of_the_server(served: Served, tmp_path: Path) -> None:
    tools = tools_of(tmp_path, served)
    assert list(tools) == ["add", "search", "picture", "fail", "hang"]
    schema = tools["add"].get_openai_tool_schema()
    assert schema.function.description == "Add two numbers."
    assert schema.function.parameters.required == ["a"]
    assert {name: each.type for name, each in schema.function.parameters.properties.items()} == {
        "a": "integer",
        "b": "integer",
    }
    added = call(tools["add"], {"a": 40, "b": 2})
    assert (added.outcome, added.response.text, added.reward) == ("ok", "42", 0.0)
    failed = call(tools["fail"], {})
    assert failed.outcome == "error" and "fail" in (failed.response.text or "")
    drawn = call(tools["picture"], {})
    assert drawn.outcome == "ok" and drawn.response.image is not None
    image = load_image(drawn.response.image[0])
    assert image.size == (3, 2) and image.getpixel((0, 0)) == (255, 0, 0)


def test_searches_are_read(served: Served, tmp_path: Path) -> None:
    class_name = "verl.tools.mcp_search_tool.MCPSearchTool"
    tools = tools_of(tmp_path, served, class_name=class_name, selected=["search", "add"])
    assert sorted(tools) == ["add", "search"]
    found = call(tools["search"], {"query": "q"})
    assert found.response.text == "Doc 1 (Title: T)\nhttp://x\nabout q\n\nDoc 2 (Title: U)\nc\n"
    assert found.metrics == {"status": "success", "queries": ["q"], "query_count": 1, "total_results": 2}
    added = call(tools["add"], {"a": 1})
    assert (added.response.text, added.metrics["status"]) == ("2", "unknown")


def test_a_slow_tool_is_cancelled_on_the_server(served: Served, tmp_path: Path) -> None:
    tool = tools_of(tmp_path, served, selected=["hang"], timeout=1.5)["hang"]
    assert call(tool, {}).outcome == "timeout"  # by config.timeout
    tool = tools_of(tmp_path, served, selected=["hang"])["hang"]
    assert call(tool, {}, 1.5).outcome == "timeout"  # by the deadline of the agent loop
    begun = served.hanging  # a deadline may come before the server has the call, on a busy machine

    async def abort() -> CallResult:
        task = asyncio.create_task(execute_call(tool, "i", {}))
        while served.hanging == begun:
            await asyncio.sleep(0.01)
        await tool.abort("i")
        return await task

    assert asyncio.run(abort()).outcome == "error"
    wait_until(lambda: len(served.cancelled) == served.hanging)


def test_a_server_that_comes_back_is_asked_again(served: Served, tmp_path: Path) -> None:
    tools = tools_of(tmp_path, served, selected=["add"], max_attempts=5)
    served.failing = 3
    assert call(tools["add"], {"a": 1}).response.text == "2"
    served.failing = 1000
    failed = call(tools["add"], {"a": 1})
    served.failing = 0
    assert failed.outcome == "error" and "in attempt 5" in (failed.response.text or "")


def test_calls_start_at_the_rate_of_the_file(served: Served, tmp_path: Path) -> None:
    tool = tools_of(tmp_path, served, selected=["add"], rate_limit=0.5)["add"]

    async def run() -> None:
        await asyncio.gather(*(execute_call(tool, "i", {"a": number}) for number in range(2)))

    asyncio.run(run())
    assert served.starts[-1] - served.starts[-2] > 1.0  # two seconds, less what the first takes longer to arrive


def test_a_server_that_is_not_there_or_refuses_the_token(served: Served, tmp_path: Path) -> None:
    path = write(tmp_path, {"gone": {"url": "http://127.0.0.1:9/mcp"}}, max_attempts=2)
    with pytest.raises(WrongInput, match=r"tools\[0\]: http://127.0.0.1:9/mcp: .* in attempt 2: start the server"):
        initialize_tools_from_config(path)
    path = write(tmp_path, {"tests": {"url": served.url, "auth_token": "wrong"}})
    with pytest.raises(WrongInput, match="HTTP status 401: write the auth_token of tests"):
        initialize_tools_from_config(path)
    path = write(tmp_path, {"tests": {"url": served.url, "auth_token": TOKEN}}, selected=["ad"])
    with pytest.raises(WrongInput, match="no server has a tool 'ad': write any of add, search"):
        initialize_tools_from_config(path)


@pytest.mark.parametrize(
    ("servers", "options", "message"),
    [
        ("{", {}, r"servers.json: cannot be read as JSON"),
        ("{}", {}, "has no servers under mcpServers"),
        ({"a": 3}, {}, "mcpServers.a: is no object"),
        ({"a": {"url": "x"}}, {}, "mcpServers.a.url='x': write an address"),
        ({"a": {"command": "x"}}, {}, "mcpServers.a: the key 'command' is unknown"),
        ({"a": {"url": "http://x", "auth_token": 3}}, {}, "auth_token: is no text"),
        ({"a": {"url": "http://x"}}, {"selected": "add"}, "tool_selected_list='add': write a list"),
        ({"a": {"url": "http://x"}}, {"type": "mpc"}, "config.type='mpc': write native or mcp"),
        ({"a": {"url": "http://x"}}, {"type": "native"}, "config.type='native': write mcp"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_asked(
    servers: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput, match=message):
        read_tools_file(write(tmp_path, servers, **options))
