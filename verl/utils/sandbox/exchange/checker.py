"""The checker's end: it runs the test code, and decides."""

import ast
import builtins
import importlib
import linecache
import sys
from _thread import get_ident
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import NoReturn

from . import test_code
from .peer import MOST_TEXT_CHARS, UNFINISHED, Ended, Peer, text_of, trace_of
from .standins import BINARY, UNARY, Remote
from .test_code import TEST_NAME
from .trust import Guarded, GuardedCallable
from .values import LIBRARIES, Value, equal_pictures, mutable_name
from .wire import Wire

PASSED, FAILED, REFUSED = range(100, 103)
"""Exit codes of a checker."""
_ALIASES = {"np": "numpy"}
_INTERNAL = (
    AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType,
    TracebackType,
)  # fmt: skip
"""Types whose attributes lead to code and variables."""
_SETTLED = UNARY.keys() - {"__next__", "__iter__", "__enter__", "__exit__", "__setitem__", "__delitem__", "__copy__"}
"""Questions that get the same answer until something else is asked or changed. An object that gave another answer each
time could be above the lower bound of a test and then below the upper one."""


class Refused(Exception):
    """The test cannot be decided outside the program's process."""


class Checker(Peer):
    """The end that runs the test.

    Each object of the program has a trusted and an untrusted stand-in, see ``trust``. An answer brings untrusted ones,
    except where the test reads an attribute or applies an operator, and all objects concerned are trusted: then an
    object that the test has made is a trusted one again.
    """

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.wire = Wire(self.stand_in, shows_functions=False)
        self.refusal: str | None = None
        self.fault: str | None = None
        """Why no test can pass any more, whatever the test code catches."""
        self._named: set[int] = set()
        """Classes of the program that the test names."""
        self._made: set[int] = set()
        """Objects that the test made of these classes."""
        self._trusts_answer = False
        self._trusting = False
        self._seen: dict[int, tuple[str, bool]] = {}
        """Kind of each object, and whether it defines equality, as at its first appearance."""
        self._guarded: dict[tuple[int, bool], Guarded] = {}
        self._expects_stop = False
        self._steps: set[int] = set()
        """Methods that may raise StopIteration."""
        self._settled: dict[tuple[Value, ...], Value] = {}
        self._bases: dict[int, tuple[Value, ...]] = {}
        self._thread = get_ident()
        self._stdout = sys.stdout

    # -- ends of the test

    def fail(self, fault: str) -> NoReturn:
        self.fault = self.fault or fault
        super().fail(fault)

    def refuse(self, reason: str) -> NoReturn:
        """Give up a test that the program's process would have to decide.

        Raises: Refused.
        """
        self.refusal = self.refusal or f"the test cannot be decided apart from the program: {reason}"
        raise Refused(self.refusal)

    # -- stand-ins

    def begin(self, kind: str) -> None:
        self._trusting = self._trusts_answer and kind == "value"

    def stand_in(self, number: int, kind: str, compares: bool) -> Value:
        kind, _ = self._seen.setdefault(number, (kind, compares))
        found = self._stand_in(number, self._trusting and number in self._made | self._named)
        return self._wait_for(found) if kind == "coroutine" else found

    def _stand_in(self, number: int, trusted: bool) -> Guarded:
        if (number, trusted) not in self._guarded:
            kind, compares = self._seen[number]
            make = Guarded if kind in ("object", "module", "coroutine") else GuardedCallable
            self._guarded[number, trusted] = make(self, number, kind, compares, trusted)
        return self._guarded[number, trusted]

    async def _wait_for(self, coroutine: Remote) -> Value:
        return self.ask("await", coroutine)

    def note_class(self, name: str, value: Value) -> Value:
        """Return a class that the test names as a trusted one, any other value as it is.

        A name in lower case is a function's by convention: a class in its place could return objects that pose as
        results.
        """
        if isinstance(value, Guarded) and value._remote_kind == "class" and name[:1].isupper():
            self._named.add(value._remote_id)
            return self._stand_in(value._remote_id, True)
        return value

    def same(self, value: Value) -> Value:
        """Return the same stand-in each time for an object of the program, and any other value as it is."""
        return self._stand_in(value._remote_id, False) if isinstance(value, Guarded) else value

    def kind(self, value: Value) -> type | Guarded:
        """Return the class of a value, also of an object of the program."""
        if not isinstance(value, Guarded):
            return type(value)
        found = self.ask("class", value)
        if not isinstance(found, Guarded):  # the program may claim one of Python's classes for any object
            self.refuse("it asks for the class of an object, which the program says is one of Python")
        return found

    # -- questions

    def ask(self, action: str, *given: Value) -> Value:
        """Return the program's answer.

        Raises: the exception that it raised; Refused; Ended.
        """
        if get_ident() != self._thread:
            self.refuse("it calls the program from several threads")
        settles = action == "base" or (action == "operate" and given[0] in _SETTLED and len(given) == 2)
        if not settles or self.wire.shared.changed() or (action != "base" and self.wire.has_shown_any()):
            self._settled.clear()
        if not settles:
            return self._ask_anew(action, given)
        question = (action, *(each._remote_id if isinstance(each, Guarded) else each for each in given))
        if question not in self._settled:
            self._settled[question] = self._ask_anew(action, given)
        return self._settled[question]

    def _ask_anew(self, action: str, given: tuple[Value, ...]) -> Value:
        operands = [each for each in given if isinstance(each, Guarded)]
        trusted = all(each._remote_trusted for each in operands)
        makes = trusted and (
            action == "deepcopy"
            or (action == "call" and operands[0]._remote_kind == "class")
            or (action == "operate" and (given[0] in BINARY or given[0] == "__enter__"))
        )
        self._trusts_answer = makes or (trusted and action == "get")
        captures = sys.stdout is not self._stdout  # the test reads the output of the program
        try:
            output, result = self.exchange(captures, action, given)
        except (StopIteration, StopAsyncIteration) as error:
            if self._expects_stop or given[0] == "__next__" or any(each._remote_id in self._steps for each in operands):
                raise
            # A StopIteration would end map() silently.
            raise RuntimeError(f"the program raised {type(error).__name__}") from error
        if captures:
            sys.stdout.write(output)
        if isinstance(result, Guarded):
            if makes:
                self._made.add(result._remote_id)
                return self._stand_in(result._remote_id, True)
            if action == "get" and given[1] in ("send", "throw", "__next__"):
                self._steps.add(result._remote_id)
        return result

    def base_value(self, value: Remote) -> tuple[Value, ...]:
        """Return the value that an object of a subclass of a built-in type holds, as a tuple; empty if it has none.

        A value that cannot change is asked for once, so that the program cannot answer each comparison with another.
        """
        if value._remote_id in self._bases:
            return self._bases[value._remote_id]
        answer = self.ask("base", value)
        if not isinstance(answer, tuple) or len(answer) > 1 or any(isinstance(each, Remote) for each in answer):
            self.fail("the program's plain value cannot be read")
        if not (answer and mutable_name(answer[0])):
            self._bases[value._remote_id] = answer
        return answer

    def have_equal_attributes(self, one: Remote, other: Remote) -> bool:
        """Return whether two objects are equal to the program and in their attributes.

        Raises: Refused if only the program says so.
        """
        answer = self.ask("compare", one, other)
        if not isinstance(answer, tuple) or len(answer) != 3:
            self.fail("the program's comparison cannot be read")
        equal, first, second = answer
        if equal is not True:
            return False
        if not equal_pictures(first, second):
            self.refuse("it compares two objects that are equal to the program only")
        return True

    # -- answers

    def answer(self, content: list[Value]) -> None:
        outer = self._trusts_answer
        super().answer(content)
        self._trusts_answer = outer

    def check_request(self, action: str, given: list[Value]) -> None:
        """Allow the program to use objects that the test passed to it, but nothing that leads from them to the test.

        Raises: PermissionError.
        """
        subjects = given[1:] if action == "operate" else given[:1]
        allowed = action in self.answers and any(map(self.wire.has_shown, subjects))
        if action in ("get", "set"):
            allowed = allowed and not (isinstance(given[0], _INTERNAL) or str(given[1]).startswith("_"))
        if not allowed:
            raise PermissionError(f"the program may not ask the test to {action}")

    def described(self, error: BaseException) -> tuple[Value, ...]:
        return type(error), (text_of(error),), text_of(error), None, ""

    # -- the life of a test

    def names(self, code: str, tree: ast.Module) -> dict[str, Value]:
        """Return the names that the test code uses but does not define: libraries and names of the program."""
        if (module := test_code.forbidden_use(tree)) is not None:
            self.refuse(f"it uses {module}")
        used = test_code.global_names(code)
        self._expects_stop = bool(used & {"StopIteration", "StopAsyncIteration"})
        found: dict[str, Value] = {}
        for name in used & test_code.attribute_owners(tree) & {*LIBRARIES, *_ALIASES}:
            try:
                found[name] = importlib.import_module(_ALIASES.get(name, name))
            except ImportError:
                self.refuse(f"it uses {name}, which is not installed")
        wanted = used - found.keys()
        theirs = self._program_names(wanted - set(dir(builtins)))
        if not theirs:  # the function under test may have the name of a built-in one
            theirs = self._program_names(wanted & set(dir(builtins)))
            if len(theirs) > 1:
                self.refuse(f"it uses {', '.join(sorted(theirs))}, which the program and Python both define")
        return {test_code.SAME: self.same, test_code.KIND: self.kind} | found | theirs

    def _program_names(self, names: set[str]) -> dict[str, Value]:
        answer = self.ask("names", tuple(sorted(names))) if names else ()
        try:
            found = {name: value for name, value in answer if name in names}
        except (TypeError, ValueError):
            self.fail("the program's names cannot be read")
        for name, value in found.items():
            if isinstance(value, Guarded) and value._remote_kind == "module":
                self.refuse(f"it uses the module {name}, which only the program imports")
            if not isinstance(value, Remote) and callable(value) and getattr(value, "__name__", name) != name:
                self.refuse(f"the program gives {name} another meaning")
            found[name] = self.note_class(name, value)
        return found

    def end(self) -> None:
        """Tell the program's process that the test has passed, unless something else forbids that."""
        if self.fault is None and self.refusal is None:
            self.send("passed")


def check(code: str, pipes: tuple[int, int]) -> tuple[int, str]:
    """Run the test code in this process; return the exit code of a checker, and the reason of a failure."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[TEST_NAME] = (len(code), None, code.splitlines(True), TEST_NAME)
    try:
        tree = ast.parse(code, TEST_NAME)
        compiled = compile(tree if test_code.rewrite(tree) else code, TEST_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return REFUSED, f"the test code does not compile: {error}"
    peer = Checker(*pipes)
    verdict = FAILED
    reason = ""
    try:
        main.__dict__.update(peer.names(code, tree))
        exec(compiled, main.__dict__)
        peer.end()
        verdict = PASSED
    except Ended:
        reason = UNFINISHED
    except BaseException as error:  # whatever ends the test is its failure
        reason = trace_of(error, TEST_NAME, chain=False)
    if peer.refusal is not None:
        return REFUSED, peer.refusal
    if peer.fault is not None:
        verdict = FAILED
        reason = peer.fault
    return verdict, reason[-MOST_TEXT_CHARS:]
