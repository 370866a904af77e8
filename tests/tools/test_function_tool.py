"""Plain functions as tools: what the model is told, answers, faults, and files that hold none."""

import asyncio
from pathlib import Path

import pytest

from verl.base_config import WrongInput
from verl.tools.calls import BadArguments, ToolError
from verl.tools.function_tool import function_names, function_tools
from verl.tools.utils.tool_registry import tools_of

FUNCTIONS = '''
import math
from os.path import join


def add(first: int, second: int = 1) -> int:
    """Add two numbers.

    Args:
        first: The first number.
        second: The second number.
    """
    return first + second


async def fail(text: str) -> str:
    """Fail.

    Args:
        text: What to say.
    """
    raise RuntimeError(text)


def _helper():
    return 0
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "tools.py"
    file.write_text(FUNCTIONS)
    return str(file)


def test_each_public_function_is_a_tool(path: str) -> None:
    assert function_names(path) == ["add", "fail"]
    add, fail = function_tools(path)
    told = add.get_openai_tool_schema().model_dump(exclude_none=True)["function"]
    assert told["name"] == "add" and told["description"] == "Add two numbers."
    assert told["parameters"]["required"] == ["first"] and set(told["parameters"]["properties"]) == {"first", "second"}
    answer, reward, _ = asyncio.run(add.execute("id", {"first": 2, "second": 3}))
    assert (answer.text, reward) == ("5", 0.0)
    with pytest.raises(BadArguments, match="third"):
        asyncio.run(add.execute("id", {"first": 1, "third": 3}))
    with pytest.raises(ToolError, match="RuntimeError: no"):
        asyncio.run(fail.execute("id", {"text": "no"}))


def test_both_files_give_tools_with_different_names(path: str, tmp_path: Path) -> None:
    listed = tmp_path / "tools.yaml"
    listed.write_text("tools: [{class_name: verl.tools.calculator_tool.CalculatorTool, config: {type: native}}]")
    turns = {"tool_config_path": str(listed), "function_tool_path": path}
    names = [tool.name for tool in tools_of(turns)]
    assert names[1:] == ["add", "fail"] and tools_of({}) == []
    other = tmp_path / "others.py"
    other.write_text(FUNCTIONS.replace("def add", f"def {names[0]}"))
    with pytest.raises(WrongInput, match="has a tool of that name"):
        tools_of(turns | {"function_tool_path": str(other)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "defines no function"),
        ("def f(:", "cannot be read"),
        ("def f(a):\n    return a", "f: .*write a docstring"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "tools.py"
    file.write_text(text)
    with pytest.raises(WrongInput, match=problem):
        function_tools(str(file))
    with pytest.raises(WrongInput, match="cannot be read"):
        function_names(str(tmp_path / "none.py"))
