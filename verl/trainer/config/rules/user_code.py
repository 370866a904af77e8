"""Python files of the user: do they define the names that the configuration gives, and can a manager call the scorer?

They are read, not executed.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.run_config import RunConfig
from verl.utils.import_utils import python_file
from verl.workers.rewards.signature import SCORER_CALLS

_SCORER = "custom_reward_function"
_VALUES = ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr


def python_file_rules(path_key: str, path: str, name_key: str, name: Any) -> tuple[list[Violation], ast.Module | None]:
    """Return what is wrong with a Python file and with the name that it should define, and its syntax tree."""
    file = python_file(path)
    if file is None:
        return [], None  # an installed module is imported by the workers
    if not file.is_file():
        expected = "no such file: write the path of a Python file, or pkg:// and the name of an installed module"
        return [Violation(path_key, path, expected)], None
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), file.name)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        return [Violation(path_key, path, f"is not valid Python: {error}")], None
    defined = {
        getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "asname", None)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Name | ast.alias)
    }
    if not isinstance(name, str) or name in defined or imports_everything(module):
        return [], module
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    expected = f"{path} does not define it; it defines {', '.join(functions) or 'nothing'}"
    return [Violation(name_key, name, expected)], module


def imports_everything(module: ast.Module) -> bool:
    """Whether a file imports by ``*``, so that its names cannot be told from its source."""
    return any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(module))


def scorer_rules(run: RunConfig, module: ast.Module) -> Iterator[Violation]:
    """Yield why the scorer that ``custom_reward_function`` names cannot be called.

    Silent if only running the file would tell.
    """
    name = run.custom_reward_function.name
    definition = _last_definition(module, name)
    if isinstance(definition, _VALUES):
        yield Violation(f"{_SCORER}.name", name, "must be a function, the file gives it a value: define it with `def`")
    elif isinstance(definition, ast.AsyncFunctionDef):
        yield Violation(f"{_SCORER}.name", name, "is asynchronous: define it with `def`")
    elif isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        manager = run.reward_model.reward_manager
        yield from _call_rules(_signature(definition), name, manager, run.custom_reward_function.reward_kwargs)


def _last_definition(module: ast.Module, name: Any) -> ast.AST | None:
    """Return what a name of the module is bound to in the end, None where branches or imports decide."""
    found: ast.AST | None = None
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            found = node
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found = node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _binds(node, name):
            return None
    return found


def _binds(node: ast.AST, name: Any) -> bool:
    return any(
        getattr(each, "name", None) == name
        or getattr(each, "asname", None) == name
        or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name)
        for each in ast.walk(node)
    )


def _signature(definition: ast.FunctionDef) -> inspect.Signature:
    """Return the parameters of a definition, by a function of the same names: its defaults are not evaluated."""
    given = definition.args
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [None if default is None else ast.Constant(...) for default in given.kw_defaults]
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    empty = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(empty, definition.name, "eval")))


def _call_rules(
    signature: inspect.Signature, name: str, manager: str, reward_kwargs: Mapping[str, Any]
) -> Iterator[Violation]:
    call = SCORER_CALLS.get(manager)
    if call is None:
        return
    problem = call.problem(signature, reward_kwargs)
    if problem is not None:
        shown = ", ".join(str(each).replace("=Ellipsis", "=...") for each in signature.parameters.values())
        expected = (
            f"{name}({shown}) cannot be called by the manager {manager!r} {problem}; write these parameters, or pass "
            f"others by {_SCORER}.reward_kwargs"
        )
        yield Violation(f"{_SCORER}.name", name, expected, others=("reward_model.reward_manager",))
