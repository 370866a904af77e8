"""Plain functions as tools: their type hints and docstrings become the schema for the model."""

import ast
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.base_config import one_line
from verl.errors import WrongInput
from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import BadArguments, ToolError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.failures import replacing_errors
from verl.utils.import_utils import load_extern_type, python_file
from verl.utils.json_types import Json, JsonObject

_WANTED = "write a docstring with a line `Args:` and one line for each parameter, and type hints"


class FunctionTool(BaseTool):
    """Calls a function, or a coroutine function, with the arguments that the model writes, and answers with its result.

    Raises: WrongInput for a function that its hints and docstring do not describe.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        from transformers.utils.chat_template_utils import get_json_schema

        def named(error: Exception) -> WrongInput:
            return WrongInput(f"{where}: {function.__name__}: {one_line(str(error))}: {_WANTED}")

        with replacing_errors(named):  # the library has a class of errors for each fault of a docstring
            schema = OpenAIFunctionToolSchema.model_validate(get_json_schema(function))
        super().__init__({}, schema)
        self.function = function

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Call the function, in a thread unless it is a coroutine function.

        Raises: BadArguments for arguments that it does not take, ToolError for an exception in it.
        """
        try:
            inspect.signature(self.function).bind(**parameters)
        except TypeError as error:
            raise BadArguments(f"{error}.") from error
        with replacing_errors(lambda error: ToolError(f"{type(error).__name__}: {error}")):
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(**parameters)
            else:
                result = await asyncio.to_thread(self.function, **parameters)
        return ToolResponse(text=str(result)), 0.0, {}


def function_names(path: str) -> list[str]:
    """Return the public functions that a Python file defines, without running it.

    Raises: WrongInput for a file that is not there, is no Python, or defines none.
    """
    file = python_file(path) or Path(path)
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), file.name)
    except (OSError, SyntaxError, ValueError) as error:
        raise WrongInput(f"cannot be read: {one_line(str(error))}: write the path of a Python file") from error
    defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [name for name in defined if not name.startswith("_")]
    if not names:
        raise WrongInput("defines no function whose name begins without an underscore: define one for each tool")
    return names


def function_tools(path: str) -> list[BaseTool]:
    """Make a tool of each public function of a Python file.

    Raises: WrongInput naming the file and the function.
    """
    return [FunctionTool(load_extern_type(path, name), path) for name in function_names(path)]
