"""The checker's stand-ins: no answer of the program decides a comparison.

``==`` is identity, or compares the plain value under the object, or compares the attributes of two objects. Operators
and methods that take a plain operand, which may be an expected value, are passed on for *trusted* objects only: objects
that the test itself made of a class that it names. Such a call must not return a number.
"""

from collections.abc import Callable
from typing import NoReturn, Protocol

from .standins import BINARY, OPERATORS, ORDERINGS, Asks, Remote, RemoteCallable, is_same, keep
from .values import COMMANDS, MUTATORS, PLAIN_NAMES, Value

_TO_NUMBERS = {"__abs__", "__int__", "__float__", "__complex__", "__round__", "__index__", "__bool__"}


class Judge(Asks, Protocol):
    """The checker, as its stand-ins see it."""

    def refuse(self, reason: str) -> NoReturn:
        """Give up a test that the program's process would have to decide."""

    def base_value(self, value: Remote) -> tuple[Value, ...]:
        """Return the value that an object of a subclass of a built-in type holds, as a tuple; empty if it has none."""

    def note_class(self, name: str, value: Value) -> Value:
        """Return a class that the test names as a trusted one, any other value as it is."""

    def have_equal_attributes(self, one: Remote, other: Remote) -> bool:
        """Return whether two objects are equal to the program and in their attributes."""


class Guarded(Remote):
    """An object of the program. A trusted and an untrusted stand-in of one object are equal."""

    __slots__ = ("_remote_compares", "_remote_derived", "_remote_trusted")
    _remote_peer: Judge
    _remote_compares: bool
    _remote_derived: bool
    _remote_trusted: bool

    def __init__(self, peer: Judge, number: int, kind: str, compares: bool, trusted: bool) -> None:
        super().__init__(peer, number, kind)
        keep(self, "_remote_compares", compares)
        keep(self, "_remote_derived", False)
        keep(self, "_remote_trusted", trusted)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_remote_"):
            raise AttributeError(name)
        peer = self._remote_peer
        if name in PLAIN_NAMES and not self._remote_trusted:
            if base := peer.base_value(self):
                if name in MUTATORS:
                    peer.refuse(f"it calls {name}() of an object that the program returned, which is not a plain value")
                return getattr(base[0], name)
            found = peer.ask("get", self, name)
            if name in COMMANDS:
                return found
            return _without_arguments(peer, name, found) if isinstance(found, Remote) else found
        return peer.note_class(name, peer.ask("get", self, name))

    @property
    def __class__(self) -> type:
        """The type of the plain value under the object, for ``isinstance``."""
        base = self._remote_peer.base_value(self)
        return type(base[0]) if base else type(self)

    def __eq__(self, other: object) -> bool:
        if is_same(self, other):
            return True
        if isinstance(other, Guarded):
            compares = self._remote_compares or other._remote_compares
            return compares and self._remote_peer.have_equal_attributes(self, other)
        return self._remote_compares and self._equals_plain(other)

    def __hash__(self) -> int:
        if self._remote_compares:
            self._remote_peer.refuse("it hashes an object whose class defines equality")
        return hash(self._remote_id)

    def __instancecheck__(self, value: Value) -> bool:
        return isinstance(value, Remote) and bool(self._remote_peer.ask("isinstance", value, self))

    def __subclasscheck__(self, value: Value) -> bool:
        return isinstance(value, Remote) and bool(self._remote_peer.ask("issubclass", value, self))

    def __mro_entries__(self, bases: tuple[Value, ...]) -> tuple[type, ...]:
        self._remote_peer.refuse("it derives a class from a class of the program")

    def _equals_plain(self, other: Value) -> bool:
        """Compare the plain value under the object."""
        if base := self._remote_peer.base_value(self):
            return bool(base[0] == other)
        if other is not None and self._remote_trusted:
            self._remote_peer.refuse("it compares an object of the program's class with a plain value")
        return False

    def _remote_unary(self, name: str, *given: Value) -> Value:
        if self._remote_derived and name in _TO_NUMBERS:
            self._remote_peer.refuse("it takes a number from an object of the program's class after arithmetic")
        if name == "__getitem__" and not self._remote_trusted and (base := self._remote_peer.base_value(self)):
            return OPERATORS[name](base[0], *given)
        return self._remote_peer.ask("operate", name, self, *given)

    def _remote_binary(self, name: str, other: Value, swapped: bool) -> Value:
        peer = self._remote_peer
        pair = (other, self) if swapped else (self, other)
        if isinstance(other, Remote):
            return peer.ask("operate", name, *pair)
        if name in ORDERINGS or not self._remote_trusted:
            if base := peer.base_value(self):
                return BINARY[name](*((other, base[0]) if swapped else (base[0], other)))
            peer.refuse(f"it applies {name} to an object of the program's class and a plain value")
        result = peer.ask("operate", name, *pair)
        if name != "__contains__":
            if not isinstance(result, Guarded):
                peer.refuse(f"{name} of the program's class and a plain value gives a plain value")
            keep(result, "_remote_derived", True)
        return result


class GuardedCallable(RemoteCallable, Guarded):
    """A function, a class, or an object that can be called."""

    __slots__ = ()


def _without_arguments(peer: Judge, name: str, function: Remote) -> Callable[..., Value]:
    """Return a method of the program's object under the name of a built-in type's method; it refuses arguments."""

    def call(*given: Value, **named: Value) -> Value:
        if given or named:
            peer.refuse(f"it passes arguments to {name}() of an object that the program returned")
        return peer.ask("call", function, given, ())

    return call
