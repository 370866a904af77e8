"""The program's end: it runs the program, and answers the checker until the test has passed."""

import copy
import dis
import json
import linecache
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType

from .peer import ANSWERS, PROGRAM_NAME, Ended, Peer, text_of, trace_of
from .values import Value, base_value, picture, plain

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_STARTER = compile(
    "".join(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing")) + f"import {', '.join(_MODULES)}",
    "<starter>",
    "exec",
)
"""Imports that common judges run before a program, whose starter code may use ``List[int]`` without importing it."""
RECURSION_LIMIT = 600_000
_lent: set[str] = set()
"""Names of the starter that the program does not bind: it can use them, and does not define them."""


class Program(Peer):
    """The end in the program's process, which the program can tamper with."""

    def serve(self) -> None:
        """Answer the checker until the test has passed. If it has not, end this process."""
        try:
            while True:
                kind, content = self.receive()
                if kind == "passed":
                    return
                self.answer(content)
                with suppress(Exception):
                    sys.stdout.flush()
        except Ended:
            os._exit(1)

    def described(self, error: BaseException) -> tuple[Value, ...]:
        """Return the parts of the exception that the checker raises instead; its trace begins in the program."""
        trace = trace_of(error, PROGRAM_NAME)
        error.__traceback__ = None  # its frames would keep the arguments alive
        return type(error), error.args, text_of(error), error, trace


# ---- questions that only the checker may ask


def _names(names: tuple[str, ...]) -> tuple[tuple[str, Value], ...]:
    space = vars(sys.modules["__main__"])
    return tuple((name, _as_named(space[name], name)) for name in names if name in space and name not in _lent)


def _as_named(value: Value, name: str) -> Value:
    """Wrap a library's function that the program has under another name as a function of the program."""
    if callable(value) and getattr(value, "__name__", name) != name and not isinstance(value, FunctionType):
        return lambda *given, **named: value(*given, **named)
    return value


def _compare(one: Value, other: Value) -> tuple[Value, ...]:
    return bool(one == other), *picture(one, other)


def _await(coroutine: Coroutine[None, None, Value]) -> Value:
    import asyncio

    return asyncio.run(coroutine)


Program.answers = ANSWERS | {
    "names": _names,
    "delete": delattr,
    "base": base_value,
    "class": type,
    "compare": _compare,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "deepcopy": copy.deepcopy,
    "await": _await,
}


# ---- its life


def run_program(
    code: CodeType, source: str, fn_name: str | None, arguments: list[Value], pipes: tuple[int, int] | None
) -> str | None:
    """Run the program as the main module of this process, answer its checker, and return its function's value as JSON.

    It begins with the names and the recursion limit that common judges give a program. The checker decides even if the
    program calls ``exit()``.
    """
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[PROGRAM_NAME] = (len(source), None, source.splitlines(True), PROGRAM_NAME)
    if fn_name:
        main.__dict__["__name__"] = "solution"  # skips code under `if __name__ == "__main__"`
    exec(_STARTER, main.__dict__)
    sys.setrecursionlimit(RECURSION_LIMIT)
    starter = dict(main.__dict__)
    bound = _bound_names(code)
    _lent.update(name for name in starter if not name.startswith("__") and name not in bound)
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if not pipes or end.code not in (None, 0):
            raise
    _lent.difference_update([name for name in _lent if main.__dict__.get(name) is not starter[name]])
    if pipes:
        sys.modules["__main__"] = main
        Program(*pipes).serve()
    if not fn_name:
        return None
    return json.dumps(_find_function(main, fn_name)(*arguments), default=plain)


def _bound_names(code: CodeType) -> set[str]:
    """Return the global names that a program binds: by a definition, an assignment, or an import of the name itself."""
    bound = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return bound.union(*(_stored_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _stored_globals(code: CodeType) -> set[str]:
    stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return stored.union(*(_stored_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _find_function(module: ModuleType, name: str) -> Callable[..., Value]:
    """Return the method of the program's class ``Solution``, or its function.

    The method comes first, as in common judges: the program may use a function of that name in it.
    """
    function = getattr(module.Solution(), name, None) if hasattr(module, "Solution") else None
    if function is None and name not in _lent:
        function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"the program defines no function {name!r} and no method of that name in Solution")
    return function
