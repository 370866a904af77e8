"""Schemas, the files of tools, the built-in answer tools, and how calls end."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.base_config import WrongInput
from verl.tools import calls
from verl.tools.base_tool import BaseTool
from verl.tools.calls import (
    BadArguments,
    CallResult,
    ToolMethodError,
    ToolOutcome,
    ToolTimeout,
    execute_call,
    unknown_tool,
)
from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.tools.utils.tool_registry import initialize_tools_from_config

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Queries."}},
            "required": ["query_list"],
        },
    },
}


def test_a_subclass_reads_the_state_of_each_instance() -> None:
    class Strict(Gsm8kTool):
        def best(self, instance_id: str) -> tuple[str, str, float]:
            kept = self._instance_dict[instance_id]
            return kept["ground_truth"], kept["response"], kept["reward"]

    async def call() -> list[tuple[str, str, float]]:
        tool = Strict({})
        instance, _ = await tool.create(ground_truth="3")
        found = [tool.best(instance)]
        for answer in ("3", "4"):
            await tool.execute(instance, {"answer": answer})
            found.append(tool.best(instance))
        return found

    assert asyncio.run(call()) == [("3", "", 0.0), ("3", "3", 1.0), ("3", "4", 1.0)]


# ---- schemas


def test_a_schema_keeps_what_its_author_wrote() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == SCHEMA
    assert schema.function.strict is False


def test_a_response_takes_lists_only() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["x"]).is_text_only()
    for kind in ("image", "video"):
        with pytest.raises(ValueError, match="must be a list"):
            ToolResponse(**{kind: "x"})


def test_a_parsed_call_becomes_arguments() -> None:
    def parse(arguments: str) -> tuple[OpenAIFunctionCallSchema, bool]:
        parsed = OpenAIFunctionParsedSchema(name="f", arguments=arguments)
        return OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)

    assert parse('{"a": 1}') == (OpenAIFunctionCallSchema(name="f", arguments={"a": 1}), False)
    for wrong in ("{", "[1]", "3", '"{}"'):
        assert parse(wrong) == (OpenAIFunctionCallSchema(name="f", arguments={}), True)


# ---- files


def write(folder: Path, content: Any) -> str:
    path = folder / "tools.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def item(**changes: Any) -> dict[str, Any]:
    return {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}, **changes}


def test_tools_are_made_in_order(tmp_path: Path) -> None:
    calculator = {"class_name": "verl.tools.calculator_tool.CalculatorTool", "config": {"type": "native", "x": 1}}
    tools = initialize_tools_from_config(write(tmp_path, {"tools": [item(tool_schema=SCHEMA), calculator]}))
    assert [tool.name for tool in tools] == ["search", "calculator"]
    assert tools[1].config == {"type": "native", "x": 1}
    schema = tools[0].get_openai_tool_schema()
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == SCHEMA


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("tools: [", ["cannot be read as YAML", "write tools:"]),
        ("tool: []", ["has no list under 'tools'"]),
        ({"tools": ["x"]}, ["tools[0]", "is no mapping"]),
        ({"tools": [item(), item(clas_name="x")]}, ["tools[1]", "'clas_name' is unknown", "write class_name"]),
        ({"tools": [item(class_name="Gsm8kTool")]}, ["tools[0].class_name='Gsm8kTool'", "dotted name"]),
        ({"tools": [item(class_name="verl.tools.gsm.Gsm8kTool")]}, ["class_name=verl.tools.gsm.", "No module named"]),
        ({"tools": [item(class_name="verl.tools.gsm8k_tool.GsmTool")]}, ["has no GsmTool", "Gsm8kTool"]),
        ({"tools": [item(class_name="pathlib.Path")]}, ["is no subclass of verl.tools.base_tool.BaseTool"]),
        ({"tools": [item(config=3)]}, ["tools[0].config=3", "write a mapping"]),
        ({"tools": [item(config={"type": "nativ"})]}, ["tools[0].config.type='nativ'"]),
        (
            {"tools": [item(tool_schema={"type": "function", "function": {"name": "a"}})]},
            ["tools[0].tool_schema.function.description", "Field required"],
        ),
        ({"tools": [item(), item()]}, ["tools[1]", "already named 'calc_gsm8k_reward'", "tools[0]"]),
        (
            {"tools": [item(class_name=f"{__name__}.Waiting")]},
            ["tools[0]", "Waiting has no schema", "write tool_schema"],
        ),
    ],
)
def test_a_wrong_file_is_refused_by_place(content: Any, parts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(WrongInput) as caught:
        initialize_tools_from_config(path)
    for part in (path, *parts):
        assert part in str(caught.value)


# ---- answer tools


@pytest.mark.parametrize(
    ("tool", "ground_truth", "right", "wrong"),
    [(Gsm8kTool({}), "72", "#### 72", "71"), (Geo3kTool({}), "\\frac{1}{2}", "0.5", "2")],
    ids=["gsm8k", "geo3k"],
)
@pytest.mark.parametrize("as_keyword", [True, False])
def test_answer_tools(tool: BaseTool, ground_truth: str, right: str, wrong: str, as_keyword: bool) -> None:
    given: dict[str, Any] = {"ground_truth": ground_truth}
    if not as_keyword:
        given = {"create_kwargs": given}

    async def run() -> list[float]:
        instance_id, _ = await tool.create(**given)
        rewards = [await tool.calc_reward(instance_id)]
        for answer in (wrong, right, right):
            rewards.append((await tool.execute(instance_id, {"answer": answer}))[1])
        rewards.append(await tool.calc_reward(instance_id))
        await tool.release(instance_id)
        with pytest.raises(KeyError):
            await tool.calc_reward(instance_id)
        return rewards

    assert asyncio.run(run()) == [0.0, -0.05, 0.0, -0.05, 1.0]


def test_a_row_without_a_ground_truth_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"tools_kwargs\.calc_gsm8k_reward\.create_kwargs\.ground_truth"):
        asyncio.run(Gsm8kTool({}).create(create_kwargs={}))


# ---- calls


class Waiting(BaseTool):
    """Does what its parameter says; counts what it had to cancel."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.ended: list[str] = []

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        do = parameters["do"]
        if do == "wait":
            try:
                await asyncio.sleep(3600)
            finally:
                self.ended.append(instance_id)
        if do == "raise":
            raise RuntimeError("broken")
        if do == "refuse":
            raise BadArguments("do something else.")
        if do == "late":
            raise ToolTimeout("too late.")
        if do == "cancel":
            raise asyncio.CancelledError
        if do == "interrupt":
            raise KeyboardInterrupt("from the tool")
        if do == "alone":
            return ToolResponse(text="done")  # type: ignore[return-value]
        if do == "metrics":
            return ToolResponse(text="done"), 0.0, ["a"]  # type: ignore[return-value]
        return ToolResponse(text="done"), 0.5, {"outcome": parameters.get("outcome", "ok"), "kwargs": kwargs}

    async def abort(self, instance_id: str) -> None:
        self.ended.append(f"abort {instance_id}")


@pytest.fixture
def waiting() -> Waiting:
    return Waiting({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ('{"do": ""}', ToolOutcome.OK, "done"),
        ('{"do": "", "outcome": "timeout"}', ToolOutcome.TIMEOUT, "done"),
        ('{"do": "", "outcome": "x"}', ToolOutcome.ERROR, "Error: ValueError: 'x' is not a valid ToolOutcome"),
        ("{", ToolOutcome.BAD_ARGUMENTS, "Error: the arguments are no JSON object."),
        ("{}", ToolOutcome.ERROR, "Error: KeyError: 'do'"),
        ('{"do": "raise"}', ToolOutcome.ERROR, "Error: RuntimeError: broken"),
        ('{"do": "refuse"}', ToolOutcome.BAD_ARGUMENTS, "Error: do something else."),
        ('{"do": "late"}', ToolOutcome.TIMEOUT, "Error: too late."),
        ('{"do": "interrupt"}', ToolOutcome.ERROR, "Error: KeyboardInterrupt: from the tool"),
        (
            '{"do": "alone"}',
            ToolOutcome.ERROR,
            "Error: TypeError: execute returned ToolResponse, not (ToolResponse, reward, metrics)",
        ),
        (
            '{"do": "metrics"}',
            ToolOutcome.ERROR,
            "Error: TypeError: execute returned list as its metrics, not a mapping",
        ),
        ('{"do": "cancel"}', ToolOutcome.ERROR, "Error: the tool cancelled the call."),
        ('{"do": "wait"}', ToolOutcome.TIMEOUT, "Error: the tool did not answer within 0.05 s."),
    ],
)
def test_how_a_call_ends(waiting: Waiting, arguments: str, outcome: ToolOutcome, text: str) -> None:
    result = asyncio.run(execute_call(waiting, "i", arguments, 0.05, given=1))
    assert (result.outcome, result.response.text) == (outcome, text)
    if text == "done":
        assert result.reward == 0.5 and result.metrics["kwargs"] == {"given": 1}
    assert waiting.ended == (["i", "abort i"] if "wait" in arguments else [])


def test_a_mistake_in_a_tool_is_logged_once_with_its_place(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    """The model reads it, but its author does not read conversations."""
    calls._logged.clear()
    with caplog.at_level("WARNING"):
        for do in ("raise", "raise", "refuse", "late"):
            asyncio.run(execute_call(waiting, "i", {"do": do}))
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.match(rf"tool search: RuntimeError: broken \({re.escape(__file__)}, line \d+\): the model", message)


def test_a_tool_whose_methods_are_no_async_def_is_refused() -> None:
    class Plain(BaseTool):
        def execute(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return ToolResponse(text="done"), 0.0, {}

    tool = Plain({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    with pytest.raises(ToolMethodError, match="execute of .* returned tuple at once: write it as async def"):
        asyncio.run(execute_call(tool, "i", {}))


def test_a_cancelled_call_cancels_its_work(waiting: Waiting) -> None:
    async def run() -> None:
        call = asyncio.create_task(execute_call(waiting, "i", {"do": "wait"}))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert sorted(waiting.ended) == ["abort i", "i"]


def test_an_unknown_tool_is_named_with_those_that_exist() -> None:
    result: CallResult = unknown_tool("serch", {"search": None, "calculator": None})
    assert result.outcome == "unknown_tool"
    assert result.response.text == "Error: there is no tool 'serch'; the tools are calculator, search."
