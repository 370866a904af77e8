"""Stand-ins: references to objects and exception classes that stay in the other process.

A stand-in passes on every question, operators included. The checker's own stand-ins, which keep the program from
deciding a comparison, are in ``trust``.
"""

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Protocol

from .values import Value

keep = object.__setattr__  # sets an attribute of a stand-in itself, not one in the other process
UNARY: dict[str, Callable[..., Value]] = {
    "__len__": len, "__iter__": iter, "__next__": next, "__reversed__": reversed, "__bool__": bool, "__str__": str,
    "__repr__": repr, "__abs__": abs, "__int__": int, "__float__": float, "__complex__": complex, "__round__": round,
    "__index__": operator.index, "__neg__": operator.neg, "__pos__": operator.pos, "__invert__": operator.invert,
    "__copy__": copy.copy, "__format__": format, "__getitem__": operator.getitem, "__setitem__": operator.setitem,
    "__delitem__": operator.delitem, "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value: value.__exit__(None, None, None),
}  # fmt: skip
"""Operations on one object, some with an index."""
ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
ORDERINGS = ("__lt__", "__le__", "__gt__", "__ge__")
BINARY: dict[str, Callable[[Value, Value], Value]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ARITHMETIC},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in ARITHMETIC},
    **{name: getattr(operator, name) for name in (*ORDERINGS, "__eq__")},
    "__contains__": operator.contains,
}
OPERATORS: Mapping[str, Callable[..., Value]] = UNARY | BINARY


class Asks(Protocol):
    """The end that holds a stand-in."""

    def ask(self, action: str, *given: Value) -> Value:
        """Return the other process's answer."""


class Remote:
    """An object of the other process."""

    __slots__ = ("_remote_id", "_remote_kind", "_remote_peer")
    _remote_peer: Asks
    _remote_id: int
    _remote_kind: str

    def __init__(self, peer: Asks, number: int, kind: str) -> None:
        keep(self, "_remote_peer", peer)
        keep(self, "_remote_id", number)
        keep(self, "_remote_kind", kind)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("_remote_"):
            raise AttributeError(name)
        return self._remote_peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Value) -> None:
        self._remote_peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote_peer.ask("delete", self, name)

    def __eq__(self, other: object) -> bool:
        return is_same(self, other) or bool(self._remote_peer.ask("operate", "__eq__", self, other))

    def __hash__(self) -> int:
        return hash(self._remote_id)

    def __deepcopy__(self, memory: dict[int, Value]) -> Value:
        return self._remote_peer.ask("deepcopy", self)

    def _remote_unary(self, name: str, *given: Value) -> Value:
        return self._remote_peer.ask("operate", name, self, *given)

    def _remote_binary(self, name: str, other: Value, swapped: bool) -> Value:
        pair = (other, self) if swapped else (self, other)
        return self._remote_peer.ask("operate", name, *pair)


def is_same(one: Value, other: Value) -> bool:
    """Return whether two values are one object, or stand for one."""
    return one is other or (
        isinstance(one, Remote) and isinstance(other, Remote) and one._remote_id == other._remote_id
    )


def _unary(name: str) -> Callable[..., Value]:
    def ask(self: Remote, *given: Value) -> Value:
        # The program does not see the exception of the test.
        return self._remote_unary(name, *(() if name == "__exit__" else given))

    return ask


def _binary(name: str, swapped: bool = False) -> Callable[[Remote, Value], Value]:
    def ask(self: Remote, other: Value) -> Value:
        return self._remote_binary(name, other, swapped)

    return ask


for _name in UNARY:
    setattr(Remote, _name, _unary(_name))
for _name in BINARY:
    if _name != "__eq__":
        setattr(Remote, _name, _binary(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _binary(f"__{_name}__", swapped=True))


class RemoteCallable(Remote):
    """A function, a class, or an object that can be called."""

    __slots__ = ()

    def __call__(self, *given: Value, **named: Value) -> Value:
        return self._remote_peer.ask("call", self, given, tuple(named.items()))


# ---- exceptions


class RemoteError(Exception):
    """The attributes that an exception of the other process has in addition to its arguments."""

    remote: Remote | None = None
    text = ""

    def __getattr__(self, name: str) -> Value:
        if self.remote is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return self.text if self.remote is not None else super().__str__()


def mirror(name: str, bases: list[Value]) -> type:
    """Make a class for exceptions of a class of the other process.

    Raises: ValueError if the bases are no exceptions.
    """
    if not name or not all(isinstance(base, type) and issubclass(base, BaseException) for base in bases):
        raise ValueError("the bases of an exception are no exceptions")
    mirrored = any(issubclass(base, RemoteError) for base in bases)
    own = () if mirrored or not all(issubclass(base, Exception) for base in bases) else (RemoteError,)
    members = {"__init__": lambda self, *given, **named: None, "__module__": "__main__"}
    return type(name, (*own, *bases), members)


def error_like(kind: Value, given: tuple[Value, ...], text: str, remote: Remote | None, trace: str) -> BaseException:
    """Return an exception like the one that the other process raised.

    Raises: ValueError if it is no exception.
    """
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ValueError("the program raised something that is no exception")
    try:
        error = kind(*given)
    except Exception:  # its class may take other arguments
        error = kind.__new__(kind)
        error.args = tuple(given)
    if isinstance(error, RemoteError):
        error.remote = remote
        error.text = text
    if trace:
        error.add_note(trace)
    return error
