"""Check from the source of the user's reward function, without running it, that its manager can call it."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.refusals import select
from verl.workers.rewards.signature import SCORER_CALLS

MANAGER_KWARGS: dict[str, tuple[str, ...]] = {
    "naive": (),
    "dapo": ("max_resp_len", "overlong_buffer_cfg"),
    "prime": ("num_processes",),
}
"""What ``reward_model.reward_kwargs`` may hold for each manager; those of batch go to the scorer."""

_NODE = "custom_reward_function"
_KWARGS = "reward_model.reward_kwargs"
_VALUES = ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr


def scorer_rules(tree: Mapping[str, Any], module: ast.Module) -> Iterator[Violation]:
    """Yield why the function that ``custom_reward_function`` names cannot be called; silent where only running the
    file would tell."""
    name, manager = select(tree, f"{_NODE}.name"), select(tree, "reward_model.reward_manager")
    definition = _last_definition(module, name)
    if isinstance(definition, _VALUES):
        yield Violation(f"{_NODE}.name", name, "must be a function, the file gives it a value: define it with `def`")
    elif isinstance(definition, ast.AsyncFunctionDef):
        yield Violation(f"{_NODE}.name", name, "is asynchronous: define it with `def`")
    elif isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        reward_kwargs = select(tree, f"{_NODE}.reward_kwargs") or {}
        yield from _call_rules(_signature(definition), name, manager, reward_kwargs)


def manager_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield arguments that the reward manager does not take, or that do not fit each other."""
    manager, given = select(tree, "reward_model.reward_manager"), select(tree, _KWARGS)
    if not isinstance(manager, str) or manager not in MANAGER_KWARGS or not isinstance(given, Mapping):
        return
    known = MANAGER_KWARGS[manager]
    for key in given.keys() - set(known):
        expected = f"is not taken by the reward manager {manager!r}: write {' or '.join(known) or 'none'}"
        yield Violation(f"{_KWARGS}.{key}", given[key], expected)
    number = given.get("num_processes", 1)
    if not _is_count(number):
        yield Violation(f"{_KWARGS}.num_processes", number, "must be an integer of 1 or more")
    buffer, limit = given.get("overlong_buffer_cfg"), given.get("max_resp_len")
    if isinstance(buffer, Mapping) and manager == "dapo":
        if not _is_count(limit):
            expected = "must be given with overlong_buffer_cfg: write the tokens that a response may have"
            yield Violation(f"{_KWARGS}.max_resp_len", limit, expected)
        elif buffer.get("enable") and not (_is_count(buffer.get("len")) and buffer["len"] <= limit):
            expected = f"must be an integer in [1, max_resp_len={limit}]"
            yield Violation(f"{_KWARGS}.overlong_buffer_cfg.len", buffer.get("len"), expected)
        for key in ("enable", "len", "penalty_factor"):
            if key not in buffer:
                yield Violation(f"{_KWARGS}.overlong_buffer_cfg.{key}", None, "is missing: write a value")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
    given, kind = definition.args, inspect.Parameter
    positional = [(each, kind.POSITIONAL_ONLY) for each in given.posonlyargs]
    positional += [(each, kind.POSITIONAL_OR_KEYWORD) for each in given.args]
    first_default = len(positional) - len(given.defaults)
    parameters = [
        kind(each.arg, way, default=... if i >= first_default else kind.empty)
        for i, (each, way) in enumerate(positional)
    ]
    if given.vararg:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...))
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _call_rules(
    signature: inspect.Signature, name: str, manager: Any, reward_kwargs: Mapping[str, Any]
) -> Iterator[Violation]:
    if manager not in SCORER_CALLS:
        return
    problem = SCORER_CALLS[manager].problem(signature, reward_kwargs)
    if problem:
        shown = ", ".join(str(each).replace("=Ellipsis", "=...") for each in signature.parameters.values())
        expected = (
            f"{name}({shown}) cannot be called by the manager {manager!r} {problem}; write these parameters, or pass "
            f"others by {_NODE}.reward_kwargs"
        )
        yield Violation(f"{_NODE}.name", name, expected)
