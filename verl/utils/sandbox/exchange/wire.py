"""Messages: how values, and the stand-ins of objects, become bytes and values again.

A message is JSON: its kind, the keys of shared containers that the sender has released, the new contents of those that
it has changed, its root, and a list of nodes. A scalar stands for itself, any other value is ``[place]``, the place of
its node: so a value may be as deep as it likes or contain itself, and one object stays one object.

| node | value |
|---|---|
| ``["list", key, *items]``, also dict, set, ... | a container that is now shared under this key |
| ``["shared", key]`` | a shared container |
| ``["tuple", *items]``, ``["frozenset", *items]`` | an immutable container |
| ``["int", hex]``, ``["bytes", hex]``, ``["complex", real, imag]``, ``["range", start, stop, step]`` | a plain value |
| ``["new", "decimal.Decimal", *arguments]`` | a value of the standard library, see ``REBUILT`` |
| ``["builtin", name]``, ``["library", module, name]`` | a function or class that both processes have |
| ``["remote", number, kind, compares]`` | an object of the sender, for which the receiver makes a stand-in |
| ``["exception", number, name, *bases]`` | an exception class of the sender |
| ``["own", number]`` | an object of the receiver |

Messages come from a program that may lie. So the reader builds exact built-in types only, takes nothing for
granted, and raises ``Unreadable`` for everything else.
"""

import builtins
import importlib
import json
from collections.abc import Callable
from types import BuiltinMethodType, CoroutineType, FunctionType, MethodType, ModuleType
from typing import TypeVar

from .shared import Shared
from .standins import Remote, mirror
from .values import (
    FACTORIES,
    LIBRARIES,
    MUTABLE,
    REBUILT,
    SCALARS,
    Container,
    Scalar,
    Value,
    contents,
    library_name,
    mutable_name,
    rebuilt_name,
)
from .values import replace_contents as fill

MOST_MESSAGE_BYTES = 16 << 20
_REAL: set[type] = {bool, float, int}
_PLAIN: set[type] = {*SCALARS, int}
_MOST_NUMBER = 1 << 32
_SMALL = 1 << 64
"""Integers below it are written in decimal digits, which Python converts in quadratic time."""

Term = Scalar | list[int]
"""A scalar, or the place of a node in a list of one number."""
Node = list[Term]
T = TypeVar("T")
MakeRemote = Callable[[int, str, bool], Value]


class Unreadable(ValueError):
    """A message does not follow the protocol."""


class Wire:
    """The memory of one end: its shared containers, the objects that it has shown, and the classes that it has seen.

    Args:
        make_remote: make the stand-in of an object from its number, kind, and whether it defines equality.
        shows_functions: let the other process pass this one any built-in function, not only types.
    """

    def __init__(self, make_remote: MakeRemote, shows_functions: bool) -> None:
        self.make_remote = make_remote
        self.shows_functions = shows_functions
        self.shared = Shared()
        self.mirrors: dict[int, type] = {}
        self._exports: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._unsent: _Writer | None = None

    def has_shown(self, value: Value) -> bool:
        """Return whether the other process has a stand-in of an object."""
        return id(value) in self._numbers

    def has_shown_any(self) -> bool:
        """Return whether the other process has a stand-in for an object of this process."""
        return bool(self._exports)

    def number(self, value: Value) -> int:
        """Return the number of an object that stays here."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._exports)
            self._exports.append(value)
        return self._numbers[id(value)]

    def export(self, number: int) -> Value:
        """Return the object of a number."""
        return self._exports[number]

    def write(self, kind: str, *root: Value) -> bytes:
        """Return a message. The containers in it count as shared once ``sent`` is called.

        Raises: ValueError if it is too large.
        """
        changed = self.shared.changed()
        released = self.shared.release(changed)
        writer = _Writer(self, changed)
        changes = [[key, *writer.terms(contents(self.shared.value(key)))] for key in changed]
        place = writer.term(root)
        message = json.dumps([kind, released, changes, place, writer.finish()]).encode()
        if len(message) > MOST_MESSAGE_BYTES:
            raise ValueError(f"a value of more than {MOST_MESSAGE_BYTES >> 20} MiB")
        self._unsent = writer
        return message

    def sent(self) -> None:
        """Note that the other process has the last message."""
        assert self._unsent is not None
        for key in self._unsent.changed:
            self.shared.agree(key)
        for value, key in self._unsent.fresh.values():
            self.shared.add(key, value)
        self.shared.told()
        self._unsent = None

    def read(self, message: bytes, begin: Callable[[str], None]) -> tuple[str, list[Value]]:
        """Return the kind and the content of a message.

        Args: ``begin`` is called with the kind of the message before any of its values is made.

        Raises: Unreadable.
        """
        try:
            kind, released, changes, root, nodes = json.loads(message)
            begin(_exactly(str, kind))
            for key in released:
                self.shared.forget(~_exactly(int, key))
            reader = _Reader(self, nodes)
            value = reader.value(root)
            for key, *terms in changes:
                reader.changes.append((~_exactly(int, key), reader.values(terms)))
            reader.finish()
        except (
            ArithmeticError,
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise Unreadable(f"a message from the program cannot be decoded: {type(error).__name__}: {error}") from None
        if type(value) is not tuple:
            raise Unreadable("the program's message is not a tuple")
        return kind, list(value)


class _Writer:
    """Turn values into terms, and the objects among them into nodes, each once."""

    def __init__(self, wire: Wire, changed: list[int]) -> None:
        self.wire = wire
        self.changed = changed
        self.fresh: dict[int, tuple[Container, int]] = {}
        """The containers that this message shares, by id, with their keys."""
        self._nodes: list[Node] = []
        self._held: list[Value] = []  # keeps the objects alive, so that no two have one id
        self._places: dict[int, list[int]] = {}

    def term(self, value: Value) -> Term:
        kind = type(value)
        if kind in SCALARS or (kind is int and -_SMALL < value < _SMALL):
            return value
        if id(value) not in self._places:
            self._places[id(value)] = [len(self._held)]
            self._held.append(value)
        return self._places[id(value)]

    def terms(self, values: list[Value]) -> list[Term]:
        """Return the terms of many values, at once if they are small scalars."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN and (int not in kinds or (kinds <= _REAL and -_SMALL < min(values) <= max(values) < _SMALL)):
            return values
        return list(map(self.term, values))

    def finish(self) -> list[Node]:
        """Return the nodes of all values, including values that other nodes refer to."""
        while len(self._nodes) < len(self._held):
            self._nodes.append(self._node(self._held[len(self._nodes)]))
        return self._nodes

    def _node(self, value: Value) -> Node:
        kind = type(value)
        if (name := mutable_name(value)) is not None:
            return self._container(name, value)
        if kind in (tuple, frozenset):
            return [kind.__name__, *map(self.term, value)]
        if kind is int:
            return ["int", hex(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is range:
            return ["range", *map(self.term, (value.start, value.stop, value.step))]
        if (known := rebuilt_name(value)) is not None:
            return ["new", known, *map(self.term, REBUILT[known][1](value))]
        if isinstance(value, Remote):
            return ["own", value._remote_id]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return ["same", self.term(value.tolist())]
        if callable(value) and getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return ["builtin", value.__name__]
        if callable(value) and (found := library_name(value)):
            return ["library", *found]
        return self._object(value)

    def _container(self, name: str, value: Container) -> Node:
        key = self.wire.shared.key(value)
        if key is not None:
            return ["shared", key]
        key = self.wire.shared.new_key()
        self.fresh[id(value)] = (value, key)
        own: list[Term] = []
        if name == "deque":
            own = [value.maxlen]
        elif name == "defaultdict":
            factory = value.default_factory
            own = [next((name for name, kind in FACTORIES.items() if kind is factory), None)]
        return [name, key, *own, *self.terms(contents(value))]

    def _object(self, value: Value) -> Node:
        """Return the node of an object of this process: its number, kind, and whether it defines equality."""
        number = self.wire.number(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", number, value.__qualname__, *map(self.term, value.__bases__)]
        if isinstance(value, type):
            sort = "class"
        elif isinstance(value, FunctionType | MethodType | BuiltinMethodType):
            sort = "function"
        elif isinstance(value, ModuleType | CoroutineType):
            sort = "module" if isinstance(value, ModuleType) else "coroutine"
        else:
            sort = "callable" if callable(value) else "object"
        compares = sort in ("object", "callable") and type(value).__eq__ is not object.__eq__
        return ["remote", number, sort, compares]


class _Reader:
    """Turn the terms of one message into values; containers get their contents in the end, since they may be cyclic."""

    def __init__(self, wire: Wire, nodes: list[Node]) -> None:
        self.wire = wire
        self.nodes = nodes
        self.changes: list[tuple[int, list[Value]]] = []
        self._made: dict[int, Value] = {}
        self._fresh: list[tuple[int, Container, list[Term]]] = []

    def value(self, term: Term) -> Value:
        if type(term) is not list:
            return _scalar(term)
        (place,) = map(_number, term)
        if place not in self._made:
            self._made[place] = self._make(*self.nodes[place])
        return self._made[place]

    def values(self, terms: list[Term]) -> list[Value]:
        """Return the values of many terms, at once if they are scalars."""
        return terms if set(map(type, terms)) <= _PLAIN else list(map(self.value, terms))

    def finish(self) -> None:
        """Fill and share the new containers, and apply the sender's changes to known ones."""
        filled = 0
        while filled < len(self._fresh):  # the contents of a container may append further containers
            key, container, terms = self._fresh[filled]
            fill(container, self.values(terms))
            filled += 1
        for key, container, _ in self._fresh:
            self.wire.shared.add(key, container)
        for key, items in self.changes:
            self.wire.shared.replace(key, items)

    def _make(self, tag: Term, *rest: Term) -> Value:
        if tag in MUTABLE:
            return self._container(_exactly(str, tag), _number(rest[0]), list(rest[1:]))
        if tag == "shared":
            return self.wire.shared.value(~_exactly(int, *rest))
        if tag in ("tuple", "frozenset"):
            return (tuple if tag == "tuple" else frozenset)(map(self.value, rest))
        if tag == "int":
            return int(_exactly(str, *rest), 16)
        if tag == "bytes":
            return bytes.fromhex(_exactly(str, *rest))
        if tag == "complex":
            return complex(*(_exactly(float, part) for part in rest))
        if tag == "range":
            return range(*map(self.value, rest))
        if tag == "new":
            return self._rebuilt(_exactly(str, rest[0]), [self.value(term) for term in rest[1:]])
        if tag == "own":
            return self.wire.export(_number(*rest))
        if tag == "same":
            return self.value(*rest)
        if tag == "builtin":
            found = getattr(builtins, _exactly(str, *rest))
            if not (self.wire.shows_functions or isinstance(found, type)):
                raise Unreadable(_exactly(str, *rest))
            return found
        if tag == "library":
            return _from_library(*(_exactly(str, name) for name in rest))
        if tag == "exception":
            return self._exception(_number(rest[0]), _exactly(str, rest[1]), list(rest[2:]))
        if tag == "remote":
            number, kind, compares = rest
            return self.wire.make_remote(_number(number), _exactly(str, kind), bool(compares))
        raise Unreadable(tag)

    def _container(self, name: str, key: int, terms: list[Term]) -> Container:
        if name == "deque":
            most, *terms = terms
            container: Container = MUTABLE[name](maxlen=None if most is None else _number(most))
        elif name == "defaultdict":
            factory, *terms = terms
            container = MUTABLE[name](None if factory is None else FACTORIES[_exactly(str, factory)])
        else:
            container = MUTABLE[name]()
        self._fresh.append((~key, container, terms))
        return container

    def _rebuilt(self, name: str, given: list[Value]) -> Value:
        module, _, kind = name.partition(".")
        constructor, _ = REBUILT[name]
        if not all(type(each) in (int, str) for each in given):
            raise Unreadable(name)
        found = getattr(importlib.import_module(module), kind)
        return (getattr(found, constructor) if constructor else found)(*given)

    def _exception(self, number: int, name: str, bases: list[Term]) -> type:
        if number not in self.wire.mirrors:
            self.wire.mirrors[number] = mirror(name, [self.value(base) for base in bases])
        return self.wire.mirrors[number]


# ---- terms: anything else, which a lying program may have put in their place, is refused


def _scalar(term: Term) -> Scalar:
    if type(term) not in _PLAIN:
        raise Unreadable(f"a {type(term).__name__} in place of a value")
    return term


def _exactly(kind: type[T], term: Term) -> T:
    if type(term) is not kind:
        raise Unreadable(f"a {type(term).__name__} in place of a {kind.__name__}")
    return term


def _number(term: Term) -> int:
    if not 0 <= _exactly(int, term) < _MOST_NUMBER:
        raise Unreadable(f"{term} in place of a small number")
    return term


def _from_library(module: str, name: str) -> Value:
    if module not in LIBRARIES or name.startswith("_"):
        raise Unreadable(f"{module}.{name}")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, ModuleType):
        raise Unreadable(f"{module}.{name}")
    return found
