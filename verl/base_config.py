"""The base of every configuration node: a dataclass that is also a read-only mapping and checks itself."""

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple


class Violation(NamedTuple):
    """One thing that is wrong: the dotted key, its value, and what would be right."""

    key: str
    value: Any
    expected: str

    def under(self, prefix: str) -> "Violation":
        """Return the same with ``prefix`` before the key."""
        return self._replace(key=f"{prefix}.{self.key}" if prefix else self.key)

    def __str__(self) -> str:
        return f"{self.key}={as_yaml(self.value)}: {self.expected}"


class ConfigError(ValueError, AssertionError):
    """The configuration cannot be used; ``violations`` lists everything that is wrong."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = list(violations)
        lines = [str(violation) for violation in self.violations]
        super().__init__(lines[0] if len(lines) == 1 else "\n  - ".join([f"{len(lines)} problems:", *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.violations,)


class UnsupportedConfigError(ConfigError, NotImplementedError):
    """The configuration asks for something that does not exist."""


def as_yaml(value: Any) -> str:
    """Return a value as one would write it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(as_yaml(item) for item in value)}]"
    return str(value) if value != "" else "''"


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A node of the configuration.

    A field is set once, by the constructor; later only if ``_mutable_fields`` of its class names it. A subclass that
    has rules yields what breaks them from ``rules``.

    Raises: ConfigError when a value has the wrong type or breaks a rule, FrozenInstanceError on a later assignment.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset()

    _target_: str = ""

    def __post_init__(self) -> None:
        violations = list(_type_violations(self)) or list(self.rules())
        if violations:
            unsupported = any("not supported" in violation.expected for violation in violations)
            raise (UnsupportedConfigError if unsupported else ConfigError)(violations)

    def rules(self) -> Iterator[Violation]:
        """Yield what is wrong with the values, by keys relative to this node."""
        return iter(())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} is set once and cannot be changed")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be deleted")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field ``key``, or ``default`` where there is none."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __contains__(self, key: object) -> bool:
        return any(field.name == key for field in fields(self))

    __hash__ = None  # type: ignore[assignment]


@cache
def _type_hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is not ClassVar}


def _type_violations(config: BaseConfig) -> Iterator[Violation]:
    for name, hint in _type_hints(type(config)).items():
        value = config.__dict__.get(name)
        if name in config.__dict__ and value != "???" and not _matches(value, hint):
            yield Violation(name, value, f"must be {_describe(hint)}")


def _matches(value: Any, hint: Any) -> bool:
    """Whether ``value`` is what the annotation says, where integers are floats, NaN is none, and a tuple is a list."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, each) for each in arguments)
    if origin in (list, tuple):
        items = arguments[:1] if arguments else (Any,)
        return isinstance(value, list | tuple) and all(_matches(item, items[0]) for item in value)
    if origin is dict or hint is dict:
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    # A node may still be a plain mapping where a caller builds only its parent.
    return isinstance(value, hint) or (issubclass(hint, BaseConfig) and isinstance(value, Mapping))


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(each) for each in arguments)
    if origin in (list, tuple):
        return f"a list of which each item is {_describe(arguments[0])}" if arguments else "a list"
    return names.get(origin or hint, "a mapping")
