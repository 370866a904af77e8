"""Run a program in one process and its test in another; the two exchange plain values.

The test code runs in the *checker*. Where it names a function or a class of the program, it holds a ``Remote``, which
asks the program's process for calls, attributes and operators. Values come back as JSON, and the checker builds plain
values of exact built-in types from them, so that a program cannot return an object that is equal to everything. The
program sees the arguments of its calls, but neither the test code nor the expected values.

It uses the standard library only, because the supervisor and the remote wrapper load this file without the package.
"""

import ast
import builtins
import collections
import copy
import fcntl
import importlib
import itertools
import json
import linecache
import operator
import os
import symtable
import sys
import traceback
from _thread import get_ident
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from io import StringIO
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
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

PROGRAM_NAME = "<solution>"
TEST_NAME = "<test>"
PASSED, FAILED, REFUSED = range(100, 103)
"""Exit codes of a checker."""
MOST_MESSAGE_BYTES = 16 << 20
MOST_ITEMS = 1_000_000
"""Items of an iterator that a function may return."""
MOST_TEXT_CHARS = 4000
UNFINISHED = "the program ended before the code appended to it\n"
LIBRARIES = (
    "math", "cmath", "re", "collections", "itertools", "functools", "operator", "string", "heapq", "bisect", "random",
    "statistics", "fractions", "decimal", "datetime", "copy", "typing", "json", "enum", "dataclasses", "numpy",
)  # fmt: skip
"""Modules that a test may use without an import; the checker imports them itself."""
_ALIASES = {"np": "numpy"}
_SHARED = {"inspect", "__main__", "unittest.mock"}
"""Modules with which a test looks into the interpreter of the program."""
_LARGE = 1 << 64
_INTERNAL = (
    AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType,
    TracebackType,
)  # fmt: skip
"""Types whose attributes lead to code and variables."""
_PLAIN_TYPES: tuple[type, ...] = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset)
_PLAIN_NAMES = {name for kind in _PLAIN_TYPES for name in dir(kind) if not name.startswith("_")}

_REBUILT: dict[str, Callable[..., tuple[object, ...]]] = {
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (None, dict(value)),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}
"""Types of the standard library that cross as values -> the arguments that build the value again."""

Term = object
"""A value in a message: itself, or the place of its node in a list of one number."""


class Unreadable(ValueError):
    """A message does not follow the protocol."""


class Ended(BaseException):
    """The other process has ended."""


class Refused(Exception):
    """The test cannot be decided outside the program's process."""


# ---- values


def _contents(value: object) -> list[object] | None:
    """Return the items of a container that a call may change; None for any other value."""
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(value.items()))
    return list(value) if isinstance(value, list | set | bytearray | collections.deque) else None


def _replace_contents(value: object, items: list[object]) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    elif isinstance(value, list | bytearray):
        value[:] = items
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(items)
    else:
        raise Unreadable("the program changed a value that cannot change")


def _base_value(value: object) -> tuple[object, ...]:
    """Return the plain value under an object of a subclass of a built-in type as one item; no item without one."""
    for scalar in (str, bytes, int, float, complex):
        if isinstance(value, scalar):
            return scalar.__getnewargs__(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return (kind(kind.__iter__(value)),)
    return (dict.copy(value),) if isinstance(value, dict) else ()


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of an object, whether in its dict or in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def plain(value: object) -> object:
    """Convert a function's result for JSON: a set, an array, an iterable, or the attributes of an object."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable):
        items = list(itertools.islice(value, MOST_ITEMS + 1))
        if len(items) > MOST_ITEMS:
            raise ValueError(f"the function returned more than {MOST_ITEMS} items")
        return items
    if attributes := _attributes(value):
        return attributes
    raise TypeError(f"the function returned a {type(value).__name__}")


def _library_name(value: object) -> tuple[str, str] | None:
    """Return the module of ``LIBRARIES`` and the name under which a function or a class stands there."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        for module in LIBRARIES:
            if getattr(sys.modules.get(module), name, None) is value:
                return module, name
    return None


# ---- the other process's objects

_UNARY = {
    "__len__": len, "__iter__": iter, "__next__": next, "__reversed__": reversed, "__bool__": bool, "__str__": str,
    "__repr__": repr, "__abs__": abs, "__int__": int, "__float__": float, "__complex__": complex, "__round__": round,
    "__index__": operator.index, "__neg__": operator.neg, "__pos__": operator.pos, "__invert__": operator.invert,
    "__copy__": copy.copy, "__format__": format, "__getitem__": operator.getitem, "__setitem__": operator.setitem,
    "__delitem__": operator.delitem, "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value, *error: value.__exit__(None, None, None),
}  # fmt: skip
"""What the checker asks of one object, and, for some, of an index."""
_TO_NUMBERS = {"__abs__", "__int__", "__float__", "__complex__", "__round__", "__index__", "__bool__"}
_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
_ORDERINGS = ["lt", "le", "gt", "ge"]
_BINARY: dict[str, Callable[[object, object], object]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*_ARITHMETIC, *_ORDERINGS, "eq")},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in _ARITHMETIC},
    "__contains__": operator.contains,
}
_OPERATORS: Mapping[str, Callable[..., object]] = _UNARY | _BINARY


class Remote:
    """An object of the other process.

    In the checker no answer of the program decides a comparison: ``==`` is identity, or compares the plain value under
    the object, or compares the attributes of two objects. Operators that take a plain operand, which may be an expected
    value, are answered for objects that the test made of classes that it names, and must not lead to a number.
    """

    __slots__ = (
        "_remote_compares",
        "_remote_derived",
        "_remote_id",
        "_remote_kind",
        "_remote_peer",
        "_remote_returned",
    )

    def __init__(self, peer: "Peer", number: int, kind: str, compares: bool, returned: bool = False) -> None:
        for name, value in (
            ("peer", peer), ("id", number), ("kind", kind), ("compares", compares), ("derived", False),
            ("returned", returned),
        ):  # fmt: skip
            object.__setattr__(self, f"_remote_{name}", value)

    def __getattr__(self, name: str) -> object:
        peer = self._remote_peer
        if name.startswith("_remote_"):
            raise AttributeError(name)
        if peer.checks and name in _PLAIN_NAMES and not _is_trusted(self):
            if base := peer.base_value(self):
                return getattr(base[0], name)
            found = peer.ask("get", self, name)
            return _without_arguments(peer, name, found) if isinstance(found, Remote) else found
        return peer.note_class(name, peer.ask("get", self, name))

    def __setattr__(self, name: str, value: object) -> None:
        self._remote_peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote_peer.ask("delete", self, name)

    def __eq__(self, other: object) -> bool:
        if self is other or (isinstance(other, Remote) and self._remote_id == other._remote_id):
            return True
        peer = self._remote_peer
        if not peer.checks:
            return bool(peer.ask("operate", "__eq__", self, other))
        if not isinstance(other, Remote):
            return self._remote_compares and _equals_plain(self, other)
        return (self._remote_compares or other._remote_compares) and peer.have_equal_attributes(self, other)

    def __hash__(self) -> int:
        if self._remote_compares and self._remote_peer.checks:
            self._remote_peer.refuse("it hashes an object whose class defines equality")
        return hash(self._remote_id)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(self._remote_peer.ask("isinstance", value, self))

    def __subclasscheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(self._remote_peer.ask("issubclass", value, self))

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        self._remote_peer.refuse("it derives a class from a class of the program")

    def __deepcopy__(self, memory: dict[int, object]) -> object:
        return self._remote_peer.ask("deepcopy", self)


class RemoteCallable(Remote):
    """A function, a class, or an object that can be called."""

    __slots__ = ()

    def __call__(self, *given: object, **named: object) -> object:
        return self._remote_peer.ask("call", self, given, named)


def _is_trusted(value: Remote) -> bool:
    """Return whether the object is a class that the test names, or the test made it of one."""
    peer = value._remote_peer
    return not value._remote_returned and value._remote_id in peer.named | peer.made


def _without_arguments(peer: "Peer", name: str, function: Remote) -> Callable[..., object]:
    """Return a method with the name of a plain value's method, which must not be asked about a plain value."""

    def call(*given: object, **named: object) -> object:
        if given or named:
            peer.refuse(f"it passes arguments to {name}() of an object that the program returned")
        return peer.ask("call", function, given, named)

    return call


def _equals_plain(value: Remote, other: object) -> bool:
    """Compare the plain value under a remote object."""
    peer = value._remote_peer
    if base := peer.base_value(value):
        return bool(base[0] == other)
    if other is not None and _is_trusted(value):
        peer.refuse("it compares an object of the program's class with a plain value")
    return False


def _unary(name: str) -> Callable[..., object]:
    def ask(self: Remote, *given: object) -> object:
        if self._remote_derived and name in _TO_NUMBERS:
            self._remote_peer.refuse("it takes a number from an object of the program's class after arithmetic")
        if name == "__exit__":
            given = ()
        return self._remote_peer.ask("operate", name, self, *given)

    return ask


def _binary(name: str, swapped: bool = False) -> Callable[[Remote, object], object]:
    def ask(self: Remote, other: object) -> object:
        peer = self._remote_peer
        pair = (other, self) if swapped else (self, other)
        if not peer.checks or isinstance(other, Remote):
            return peer.ask("operate", name, *pair)
        if name.strip("_") in _ORDERINGS or not _is_trusted(self):
            if base := peer.base_value(self):
                return _OPERATORS[name](*((other, base[0]) if swapped else (base[0], other)))
            peer.refuse(f"it applies {name} to an object of the program's class and a plain value")
        result = peer.ask("operate", name, *pair)
        if name != "__contains__":
            if not isinstance(result, Remote):
                peer.refuse(f"{name} of the program's class and a plain value gives a plain value")
            object.__setattr__(result, "_remote_derived", True)
        return result

    return ask


for _name in _UNARY:
    setattr(Remote, _name, _unary(_name))
for _name in _BINARY:
    if _name != "__eq__":
        setattr(Remote, _name, _binary(_name))
for _name in _ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _binary(f"__{_name}__", swapped=True))


class RemoteError(Exception):
    """The attributes that an exception of the other process has in addition to its arguments."""

    remote: Remote | None = None
    text = ""

    def __getattr__(self, name: str) -> object:
        if self.remote is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return self.text if self.remote is not None else super().__str__()


def _mirror(name: str, bases: list[type]) -> type:
    """Make a class for exceptions of a class of the other process."""
    if not all(isinstance(base, type) and issubclass(base, BaseException) for base in bases):
        raise Unreadable("the bases of an exception are no exceptions")
    mirrored = any(issubclass(base, RemoteError) for base in bases)
    own = () if mirrored or not all(issubclass(base, Exception) for base in bases) else (RemoteError,)
    members = {"__init__": lambda self, *given, **named: None, "__module__": "__main__"}
    return type(name, (*own, *bases), members)


# ---- messages


class Peer:
    """One end of the exchange: asks the other process, and answers it while it waits.

    A request names in its nodes the containers among the arguments. The answer holds the new contents of those that the
    call changed, and may return one of them, so that a changed argument and its identity survive.
    """

    def __init__(self, reader: int, writer: int, checks: bool) -> None:
        self.reader = reader
        self.writer = writer
        self.checks = checks
        self.named: set[int] = set()
        """Classes of the program that the test names."""
        self.made: set[int] = set()
        """Objects that the test made of these classes."""
        self.refusal: str | None = None
        self.fault: str | None = None
        """Why no test can pass any more, whatever the test code catches."""
        self._exports: list[object] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, object] = {}
        self._returned: dict[int, Remote] = {}
        self._answering: dict[int, int] = {}
        self._thread = get_ident()
        self._stdout = sys.stdout

    # -- bytes

    def _send(self, message: bytes) -> None:
        if len(message) > MOST_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MOST_MESSAGE_BYTES >> 20} MiB")
        rest = memoryview(len(message).to_bytes(4, "big") + message)
        while rest:
            try:
                rest = rest[os.write(self.writer, rest) :]
            except OSError:
                self._fail(UNFINISHED)

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self.reader, min(size, 1 << 20))
            except OSError:
                part = b""
            if not part:
                self._fail(UNFINISHED)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _receive(self) -> bytes:
        size = int.from_bytes(self._read(4), "big")
        if size > MOST_MESSAGE_BYTES:
            self._fail("the program sent a message that is too large")
        return self._read(size)

    def _fail(self, fault: str) -> NoReturn:
        self.fault = fault
        raise Ended(fault)

    def refuse(self, reason: str) -> NoReturn:
        """Give up a test that the program's process would have to decide.

        Raises: Refused.
        """
        self.refusal = self.refusal or f"the test cannot be decided apart from the program: {reason}"
        raise Refused(self.refusal)

    # -- values to bytes

    def dump(self, root: object, structure: bool = False) -> tuple[bytes, list[object]]:
        """Return a value as a message, and the object of each node.

        Args: ``structure`` writes an object as a list of its class and attributes.
        """
        nodes: list[list[Term]] = []
        held: list[object] = []  # keeps the objects alive, so that no two have one id
        places: dict[int, int] = {}

        def term(value: object) -> Term:
            kind = type(value)
            if value is None or kind in (bool, float, str) or (kind is int and -_LARGE < value < _LARGE):
                return value
            if id(value) not in places:
                places[id(value)] = len(held)
                held.append(value)
            return [places[id(value)]]

        result = term(root)
        while len(nodes) < len(held):
            nodes.append(self._node(held[len(nodes)], term, structure))
        return json.dumps([result, nodes]).encode(), held

    def _node(self, value: object, term: Callable[[object], Term], structure: bool) -> list[Term]:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if id(value) in self._answering:
            return ["yours", self._answering[id(value)]]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *map(term, value)]
        if kind is dict:
            return ["dict", *map(term, itertools.chain.from_iterable(value.items()))]
        if kind is int:
            return ["int", hex(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind is range:
            return ["range", *map(term, (value.start, value.stop, value.step))]
        if name in _REBUILT and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind:
            return ["new", *name.rsplit(".", 1), *map(term, _REBUILT[name](value))]
        if isinstance(value, Remote):
            return ["own", value._remote_id]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return ["same", term(value.tolist())]
        if structure and not callable(value):
            pairs = itertools.chain.from_iterable(_attributes(value).items())
            return ["list", kind.__qualname__, *map(term, _base_value(value)), *map(term, pairs)]
        if callable(value) and getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return ["builtin", value.__name__]
        if callable(value) and (found := _library_name(value)):
            return ["library", *found]
        return self._export(value, term)

    def _export(self, value: object, term: Callable[[object], Term]) -> list[Term]:
        """Return the node of an object that stays here: its number, kind, and whether it defines equality."""
        kind = type(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self._number(value), value.__qualname__, *map(term, value.__bases__)]
        if isinstance(value, type):
            sort = "class"
        elif isinstance(value, FunctionType | MethodType | BuiltinMethodType):
            sort = "function"
        elif isinstance(value, ModuleType | CoroutineType):
            sort = "module" if isinstance(value, ModuleType) else "coroutine"
        else:
            sort = "callable" if callable(value) else "object"
        compares = sort in ("object", "callable") and kind.__eq__ is not object.__eq__
        return ["remote", self._number(value), sort, compares]

    def _number(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._exports)
            self._exports.append(value)
        return self._numbers[id(value)]

    # -- bytes to values

    def load(self, message: bytes, sent: list[object]) -> tuple[object, dict[int, object]]:
        """Return the value of a message, and its objects by node; ``sent`` are the objects of the message it answers.

        Raises: Unreadable.
        """
        try:
            root, nodes = json.loads(message)
            return self._build(root, nodes, sent)
        except (
            ArithmeticError,
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise Unreadable(f"the program's value cannot be read: {type(error).__name__}: {error}") from None

    def _build(self, root: Term, nodes: list[list[Term]], sent: list[object]) -> tuple[object, dict[int, object]]:
        made: dict[int, object] = {}
        waiting: list[tuple[object, list[Term]]] = []

        def value(term: Term) -> object:
            if not isinstance(term, list):
                return term
            (place,) = term
            if place not in made:
                made[place] = self._make(nodes[place], value, waiting, sent)
            return made[place]

        result = value(root)
        while waiting:
            container, terms = waiting.pop()
            _replace_contents(container, [value(term) for term in terms])
        return result, made

    def _make(
        self,
        node: list[Term],
        value: Callable[[Term], object],
        waiting: list[tuple[object, list[Term]]],
        sent: list[object],
    ) -> object:
        tag, *rest = node
        if tag in ("list", "dict", "set"):
            empty: object = {"list": list, "dict": dict, "set": set}[tag]()
            waiting.append((empty, rest))
            return empty
        if tag in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[tag](map(value, rest))
        if tag in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[tag].fromhex(rest[0])
        if tag in ("complex", "range"):
            return {"complex": complex, "range": range}[tag](*map(value, rest))
        if tag == "int":
            return int(rest[0], 16)
        if tag == "yours":
            return sent[rest[0]]
        if tag == "own":
            return self._exports[rest[0]]
        if tag == "same":
            return value(rest[0])
        if tag == "new":
            module, name, *given = rest
            if f"{module}.{name}" not in _REBUILT:
                raise Unreadable(f"{module}.{name}")
            return getattr(importlib.import_module(module), name)(*map(self._filled(value, waiting), given))
        if tag == "builtin":
            found = getattr(builtins, rest[0])
            if self.checks and not isinstance(found, type):
                raise Unreadable(rest[0])
            return found
        if tag == "library":
            module, name = rest
            if module not in LIBRARIES or name.startswith("_"):
                raise Unreadable(f"{module}.{name}")
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, ModuleType):
                raise Unreadable(f"{module}.{name}")
            return found
        return self._remote(tag, rest, value)

    def _filled(
        self, value: Callable[[Term], object], waiting: list[tuple[object, list[Term]]]
    ) -> Callable[[Term], object]:
        """Return a function that builds a value and fills its containers at once, for a constructor."""

        def build(term: Term) -> object:
            before = len(waiting)
            result = value(term)
            while len(waiting) > before:
                container, terms = waiting.pop()
                _replace_contents(container, [value(each) for each in terms])
            return result

        return build

    def _remote(self, tag: str, rest: list[Term], value: Callable[[Term], object]) -> object:
        """Return the stand-in of an object of the other process, one for each number."""
        number = rest[0]
        if number not in self._remotes:
            if tag == "exception":
                self._remotes[number] = _mirror(rest[1], [value(base) for base in rest[2:]])
            elif tag == "remote":
                _, kind, compares = rest
                make = Remote if kind in ("object", "module", "coroutine") else RemoteCallable
                self._remotes[number] = make(self, number, kind, bool(compares))
            else:
                raise Unreadable(tag)
        found = self._remotes[number]
        if isinstance(found, Remote) and found._remote_kind == "coroutine":
            return self._wait_for(found)
        return found

    async def _wait_for(self, coroutine: Remote) -> object:
        return self.ask("await", coroutine)

    # -- requests

    def ask(self, action: str, *given: object) -> object:
        """Return the other process's answer.

        Raises: the exception that it raised; Refused; Unreadable; Ended.
        """
        if get_ident() != self._thread:
            self.refuse("it calls the program from several threads")
        captures = self.checks and sys.stdout is not self._stdout  # the test reads what the program prints
        message, held = self.dump(["ask", captures, action, *given])
        self._send(message)
        while True:
            try:
                root, made = self.load(self._receive(), held)
                if root[0] == "ask":
                    self._answer(root, made)
                    continue
                kind, output, changes, *result = root
                for place, items in changes:
                    _replace_contents(held[place], items)
            except (LookupError, TypeError, ValueError) as error:
                self._fail(str(error))
            if captures:
                sys.stdout.write(str(output))
            if kind == "raise":
                raise self._error(*result)
            return self._judged(result[0], action, given) if self.checks else result[0]

    def _judged(self, result: object, action: str, given: tuple[object, ...]) -> object:
        """Note an object that the test made, and return one that the program chose as an untrusted stand-in."""
        if not isinstance(result, Remote):
            return result
        operands = [each for each in given if isinstance(each, Remote)]
        if all(map(_is_trusted, operands)):
            number = result._remote_id
            makes = action == "call" and operands[0]._remote_id in self.named
            operates = action == "operate" and (given[0] in _BINARY or given[0] == "__enter__")
            if makes or operates or action == "deepcopy":
                self.made.add(number)
            if number in self.made and (makes or operates or action in ("get", "deepcopy")):
                return result
            if action == "get" and result._remote_kind == "class":
                return result
        if result._remote_id not in self._returned:
            self._returned[result._remote_id] = type(result)(
                self, result._remote_id, result._remote_kind, result._remote_compares, returned=True
            )
        return self._returned[result._remote_id]

    def serve(self) -> None:
        """Answer requests until the test has passed. If it has not, end this process."""
        try:
            while True:
                root, made = self.load(self._receive(), [])
                if root == "passed":
                    return
                self._answer(root, made)
        except Ended:
            os._exit(1)

    def _answer(self, root: list[object], made: dict[int, object]) -> None:
        _, captures, action, *given = root
        before = {place: items for place, value in made.items() if (items := _contents(value)) is not None}
        output = StringIO()
        stdout = sys.stdout
        if captures:
            sys.stdout = output
        try:
            if self.checks:
                self._check_request(action, given)
            result = ["value", *_ANSWERS[action](self, *given)]
        except Ended:
            raise
        except BaseException as error:  # whatever the program raises is its answer
            result = ["raise", *self._describe(error)]
        if captures:
            sys.stdout = stdout
        changes = [
            [place, _contents(made[place])]
            for place, items in before.items()
            if not _same_items(items, _contents(made[place]))
        ]
        outer = self._answering
        self._answering = {id(made[place]): place for place in before}
        try:
            message, _ = self.dump([result[0], output.getvalue(), changes, *result[1:]], action == "compare")
            self._send(message)
        except Exception as error:  # a value that cannot be sent
            self._send(self.dump(["raise", "", [], *self._describe(error)])[0])
        finally:
            self._answering = outer
        if not self.checks:
            with suppress(Exception):
                sys.stdout.flush()

    def _check_request(self, action: str, given: list[object]) -> None:
        """Let the program use the objects that the test passed to it, and nothing that leads from there to the test.

        Raises: PermissionError.
        """
        subjects = given[1:] if action == "operate" else given[:1]
        allowed = action in ("get", "set", "call", "operate") and any(id(each) in self._numbers for each in subjects)
        if action in ("get", "set"):
            allowed = allowed and not (isinstance(given[0], _INTERNAL) or str(given[1]).startswith("_"))
        if not allowed:
            raise PermissionError(f"the program may not ask the test to {action}")

    # -- exceptions

    def _describe(self, error: BaseException) -> list[object]:
        """Return an exception's class, arguments, text and trace, and in the program's process the exception."""
        if self.checks:
            return [type(error), (_text(error),), _text(error), None, ""]
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != PROGRAM_NAME:
            trace = trace.tb_next
        try:
            shown = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        except BaseException:  # its text may raise
            shown = type(error).__name__
        return [type(error), error.args, _text(error), error, shown[-MOST_TEXT_CHARS:]]

    def _error(
        self, kind: object, given: tuple[object, ...], text: str, remote: Remote | None, trace: str
    ) -> BaseException:
        """Return an exception like the one that the other process raised."""
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            self._fail("the program raised something that is no exception")
        try:
            error = kind(*given)
        except Exception:  # its class may take other arguments
            error = kind.__new__(kind)
            error.args = tuple(given)
        if isinstance(error, RemoteError):
            error.remote = remote
            error.text = str(text)
        if trace:
            error.add_note(str(trace))
        return error

    # -- for the checker

    def end(self) -> None:
        """Tell the program's process that the test has passed, unless something else stands against it."""
        if self.fault is None and self.refusal is None:
            self._send(self.dump("passed")[0])

    def base_value(self, value: Remote) -> tuple[object, ...]:
        """Return the plain value under an object as one item; no item without one."""
        answer = self.ask("base", value)
        if not isinstance(answer, tuple) or any(isinstance(each, Remote) for each in answer):
            self._fail("the program's plain value cannot be read")
        return answer

    def note_class(self, name: str, value: object) -> object:
        """Record a class that the test names.

        A name in lower case is a function's by convention: a class in its place could return objects that pose as
        results.
        """
        if isinstance(value, Remote) and value._remote_kind == "class" and name[:1].isupper():
            self.named.add(value._remote_id)
        return value

    def names(self, code: str) -> dict[str, object]:
        """Return what the test code uses without defining it: libraries, and the program's functions and classes."""
        tree = ast.parse(code)
        self._check_imports(tree)
        table = symtable.symtable(code, TEST_NAME, "exec")
        used = _global_names(table) - {each.get_name() for each in table.get_symbols() if each.is_assigned()}
        bases = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        found: dict[str, object] = {}
        for name in used & bases & {*LIBRARIES, *_ALIASES}:
            try:
                found[name] = importlib.import_module(_ALIASES.get(name, name))
            except ImportError:
                continue
        wanted = used - found.keys()
        theirs = self._program_names(wanted - set(dir(builtins)))
        if not theirs:  # the function under test may have the name of a built-in one
            theirs = self._program_names(wanted & set(dir(builtins)))
            if len(theirs) > 1:
                self.refuse(f"it uses {', '.join(sorted(theirs))}, which the program and Python both define")
        return found | theirs

    def _program_names(self, names: set[str]) -> dict[str, object]:
        answer = self.ask("names", sorted(names)) if names else {}
        if not isinstance(answer, dict):
            self._fail("the program's names are no dict")
        found = {name: value for name, value in answer.items() if name in names}
        for name, value in found.items():
            if isinstance(value, Remote) and value._remote_kind == "module":
                self.refuse(f"it uses the module {name}, which only the program imports")
            if not isinstance(value, Remote) and callable(value) and getattr(value, "__name__", name) != name:
                self.refuse(f"the program gives {name} another meaning")
            self.note_class(name, value)
        return found

    def _check_imports(self, tree: ast.Module) -> None:
        """Refuse tests that look into the program's interpreter."""
        for node in ast.walk(tree):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute) and node.attr == "stdin":
                modules = ["sys.stdin"]
            if shared := [name for name in modules if name in _SHARED or name == "sys.stdin"]:
                self.refuse(f"it uses {shared[0]}")

    def have_equal_attributes(self, one: Remote, other: Remote) -> bool:
        """Return whether two objects are equal to the program and in their attributes.

        Raises: Refused if only the program says so.
        """
        equal, first, second = self.ask("compare", one, other)
        if not equal:
            return False
        if first != second:
            self.refuse("it compares two objects that are equal to the program only")
        return True


def _same_items(one: list[object], other: list[object] | None) -> bool:
    return other is not None and len(one) == len(other) and all(map(operator.is_, one, other))


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:MOST_TEXT_CHARS]
    except BaseException:  # its text may raise anything
        return ""


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that a scope and the scopes in it read."""
    top = table.get_type() == "module"
    names = {each.get_name() for each in table.get_symbols() if each.is_referenced() and (top or each.is_global())}
    return names.union(*map(_global_names, table.get_children()))


# ---- answers: each takes the answering end and what was asked, and returns a list of one result


def _names(peer: Peer, names: list[str]) -> list[object]:
    space = vars(sys.modules["__main__"])
    return [{name: _as_named(space[name], name) for name in names if name in space}]


def _as_named(value: object, name: str) -> object:
    """Return a library's function under another name as a function of the program."""
    if callable(value) and getattr(value, "__name__", name) != name and not isinstance(value, FunctionType):
        return lambda *given, **named: value(*given, **named)
    return value


def _get(peer: Peer, value: object, name: str) -> list[object]:
    return [getattr(value, name)]


def _set(peer: Peer, value: object, name: str, content: object) -> list[object]:
    setattr(value, name, content)
    return [None]


def _operate(peer: Peer, name: str, *given: object) -> list[object]:
    return [_OPERATORS[name](*given)]


def _compare(peer: Peer, one: object, other: object) -> list[object]:
    return [[bool(one == other), one, other]]


def _await(peer: Peer, coroutine: Coroutine[object, object, object]) -> list[object]:
    import asyncio

    return [asyncio.run(coroutine)]


_ANSWERS: dict[str, Callable[..., list[object]]] = {
    "names": _names,
    "get": _get,
    "set": _set,
    "delete": lambda peer, value, name: [delattr(value, name)],
    "call": lambda peer, function, given, named: [function(*given, **named)],
    "operate": _operate,
    "base": lambda peer, value: [_base_value(value)],
    "compare": _compare,
    "isinstance": lambda peer, value, kind: [isinstance(value, kind)],
    "issubclass": lambda peer, value, kind: [issubclass(value, kind)],
    "deepcopy": lambda peer, value: [copy.deepcopy(value)],
    "await": _await,
}


# ---- the two processes


def keep_files(files: list[int]) -> None:
    """Number open files from 0 and close all others."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(files)) for descriptor in files]
    for target, descriptor in enumerate(above):
        os.dup2(descriptor, target)
    os.closerange(len(files), 1 << 16)


def run_program(
    code: CodeType, source: str, fn_name: str | None, arguments: list[object], pipes: tuple[int, int] | None
) -> str | None:
    """Run the program as the main module of this process, answer its checker, and return its function's value as JSON.

    The checker decides even if the program calls ``exit()``.
    """
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[PROGRAM_NAME] = (len(source), None, source.splitlines(True), PROGRAM_NAME)
    if fn_name:
        main.__dict__["__name__"] = "solution"  # skips code under `if __name__ == "__main__"`
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if not pipes or end.code not in (None, 0):
            raise
    if pipes:
        sys.modules["__main__"] = main
        Peer(*pipes, checks=False).serve()
    if not fn_name:
        return None
    return json.dumps(find_function(main, fn_name)(*arguments), default=plain)


def find_function(module: ModuleType, name: str) -> Callable[..., object]:
    """Return the program's function, or the method of its class ``Solution``."""
    function = getattr(module, name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), name, None)
    if not callable(function):
        raise AttributeError(f"the program defines no function {name!r} and no method of that name in Solution")
    return function


def check(code: str, pipes: tuple[int, int]) -> tuple[int, str]:
    """Run the test code in this process; return the exit code of a checker, and the reason of a failure."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[TEST_NAME] = (len(code), None, code.splitlines(True), TEST_NAME)
    peer = Peer(*pipes, checks=True)
    reason = ""
    try:
        compiled = compile(code, TEST_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return REFUSED, f"the test code does not compile: {error}"
    try:
        main.__dict__.update(peer.names(code))
        exec(compiled, main.__dict__)
        peer.end()
    except Ended:
        reason = UNFINISHED
    except BaseException as error:  # whatever ends the test is its failure
        reason = _trace_of_test(error)
    if peer.refusal is not None:
        return REFUSED, peer.refusal
    reason = peer.fault or reason
    return (FAILED, reason[-MOST_TEXT_CHARS:]) if reason else (PASSED, "")


def _trace_of_test(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != TEST_NAME:
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace, chain=False))
    except BaseException:  # its text may raise
        return type(error).__name__
