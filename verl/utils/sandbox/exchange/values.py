"""Parts of values: the contents of containers, the fields of numbers and dates, the attributes of objects."""

import collections
import itertools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Protocol

Scalar = None | bool | int | float | str
Container = list["Value"] | dict["Value", "Value"] | set["Value"] | bytearray | collections.deque["Value"]
"""A container that can change; see ``MUTABLE``."""


class Instance(Protocol):
    """An object of the program or of the test: any class may have made it, and only its attributes are known."""

    __dict__: dict[str, "Value"]


Value = Scalar | complex | Iterable["Value"] | Callable[..., "Value"] | ModuleType | Instance
"""What one process can ask of the other, or pass to it: a plain value, a function or class, or an object."""
MOST_ITEMS = 1_000_000
"""Items of an iterator that a function may return."""
LIBRARIES = (
    "math", "cmath", "re", "collections", "itertools", "functools", "operator", "string", "heapq", "bisect", "random",
    "statistics", "fractions", "decimal", "datetime", "copy", "typing", "json", "enum", "dataclasses", "numpy",
)  # fmt: skip
"""Modules that a test may use without an import; the checker imports them itself."""
SCALARS = (type(None), bool, float, str)

MUTABLE: dict[str, type] = {
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
    "deque": collections.deque,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
"""Containers that cross with their contents, by name. An object of a subclass stays in its process."""
FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
"""Factories with which a defaultdict may cross; with another one it arrives without a factory."""
REBUILT: dict[str, tuple[str, Callable[..., tuple[int | str, ...]]]] = {
    "decimal.Decimal": ("", lambda value: (str(value),)),
    "fractions.Fraction": ("", lambda value: (value.numerator, value.denominator)),
    "datetime.date": ("fromisoformat", lambda value: (value.isoformat(),)),
    "datetime.time": ("fromisoformat", lambda value: (value.isoformat(),)),
    "datetime.datetime": ("fromisoformat", lambda value: (value.isoformat(),)),
    "datetime.timedelta": ("", lambda value: (value.days, value.seconds, value.microseconds)),
}
"""Immutable types of the standard library that cross -> the constructor, and the arguments that build the value."""
_NAMES = {kind: name for name, kind in MUTABLE.items()}
_PLAIN_TYPES: tuple[type, ...] = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset)
PLAIN_NAMES = {name for kind in _PLAIN_TYPES for name in dir(kind) if not name.startswith("_")}
"""Methods of plain values."""
MUTATORS = {
    "add", "append", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop",
    "popitem", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update",
}  # fmt: skip
COMMANDS = {"add", "append", "clear", "extend", "insert", "reverse", "sort", "update"}
"""Methods whose result says nothing about their arguments, such as methods of a builder that returns itself."""


def mutable_name(value: Value) -> str | None:
    """Return the name in ``MUTABLE`` of a container's type; None for any other value."""
    return _NAMES.get(type(value))


def rebuilt_name(value: Value) -> str | None:
    """Return the name in ``REBUILT`` of a value's type; None for any other value."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = name in REBUILT and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    return name if known else None


def contents(value: Container) -> list[Value]:
    """Return the items of a mutable container; keys and values in turn for a dict."""
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(value.items()))
    if isinstance(value, list | set | bytearray | collections.deque):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no contents that can change")


def replace_contents(value: Container, items: list[Value]) -> None:
    """Give a mutable container other contents."""
    if isinstance(value, list | bytearray):
        value[:] = items
    elif isinstance(value, dict):
        pairs = dict(zip(items[::2], items[1::2], strict=True))
        value.clear()
        for key, content in pairs.items():  # update() of a Counter would count
            value[key] = content
    elif isinstance(value, set):
        value.clear()
        value.update(items)
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(items)
    else:
        raise TypeError(f"a {type(value).__name__} has no contents that can change")


def base_value(value: Value) -> tuple[Value, ...]:
    """Return the plain value under an object of a subclass of a built-in type as one item; no item without one."""
    for scalar in (str, bytes, int, float, complex):
        if isinstance(value, scalar):
            return scalar.__getnewargs__(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return (kind(kind.__iter__(value)),)
    return (dict.copy(value),) if isinstance(value, dict) else ()


def attributes(value: Value) -> dict[str, Value]:
    """Return the attributes of an object, whether in its dict or in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def plain(value: Value) -> list[Value] | dict[str, Value]:
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
    if found := attributes(value):
        return found
    raise TypeError(f"the function returned a {type(value).__name__}")


def library_name(value: Value) -> tuple[str, str] | None:
    """Return the module of ``LIBRARIES`` and the name under which a function or a class stands there."""
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        for module in LIBRARIES:
            if getattr(sys.modules.get(module), name, None) is value:
                return module, name
    return None


# ---- comparison of objects by their attributes

Picture = Value | list["Picture"]
"""A scalar, a set or a function as it is; of all else, a list of its class, its plain value and its attributes."""


def picture(*values: Value) -> list[Picture]:
    """Return values with every object in them replaced by its class, the plain value under it, and its attributes.

    Nothing recurses, so that a long linked list has a picture; an object that refers to itself has a cyclic one.
    """
    seen: dict[int, list[Picture]] = {}
    held: list[Value] = []  # keeps objects alive, so that no two have one id
    waiting: list[tuple[list[Picture], list[Value]]] = []

    def shown(value: Value) -> Picture:
        kind = type(value)
        if kind in SCALARS or kind in (int, complex, bytes, set, frozenset) or callable(value):
            return value
        if id(value) not in seen:
            held.append(value)
            parts: list[Picture] = []
            seen[id(value)] = parts
            if kind in (list, tuple):
                waiting.append((parts, [kind.__name__, *value]))
            elif kind is dict:
                waiting.append((parts, ["dict", *itertools.chain.from_iterable(sorted(value.items(), key=_order))]))
            else:
                pairs = itertools.chain.from_iterable(sorted(attributes(value).items()))
                waiting.append((parts, [kind.__qualname__, *base_value(value), *pairs]))
        return seen[id(value)]

    found = [shown(value) for value in values]
    while waiting:
        parts, items = waiting.pop()
        parts += map(shown, items)
    return found


def _order(item: tuple[Value, Value]) -> str:
    return repr(item[0])


def equal_pictures(one: Picture, other: Picture) -> bool:
    """Return whether two pictures are equal, however deep or cyclic they are."""
    waiting = [(one, other)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        first, second = waiting.pop()
        if type(first) is list and type(second) is list:
            if (id(first), id(second)) in seen:
                continue
            seen.add((id(first), id(second)))
            if len(first) != len(second):
                return False
            waiting += zip(first, second, strict=True)
        elif first != second:
            return False
    return True
