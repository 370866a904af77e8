"""The nodes of the configuration: dataclasses that are read-only mappings and check themselves, and their parser."""

import enum
import importlib.util
import pkgutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.errors import UnsupportedInput, WrongSetting
from verl.errors import WrongInput as WrongInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Plain = TypeVar("Plain", bound="DataclassInstance")
Node = TypeVar("Node", bound="BaseConfig")
Tree = Mapping[str, Any]


class Kind(enum.Enum):
    """Why a value is refused: it is wrong, this version does not support it, or nothing would read it."""

    WRONG = "wrong"
    UNSUPPORTED = "unsupported"
    IDLE = "idle"


class Violation(NamedTuple):
    """One thing that is wrong: the dotted key, its value, what would be right, and the other keys involved."""

    key: str
    value: Any
    expected: str
    kind: Kind = Kind.WRONG
    others: tuple[str, ...] = ()

    @classmethod
    def unsupported(cls, key: str, value: Any, expected: str) -> "Violation":
        """Return a value that this version does not support."""
        return cls(key, value, expected, Kind.UNSUPPORTED)

    def under(self, prefix: str) -> "Violation":
        """Return the same with ``prefix`` before the key."""
        return self._replace(key=f"{prefix}.{self.key}" if prefix else self.key)

    def __str__(self) -> str:
        return f"{self.key}={one_line(as_yaml(self.value))}: {self.expected}"


class Idle(NamedTuple):
    """Keys below ``node`` that nothing reads while the key ``switch`` has the value ``off``.

    ``reason`` says why, if the switch does not tell.
    """

    switch: str
    off: Any
    node: str
    names: tuple[str, ...]
    reason: str = ""


class ConfigError(WrongSetting):
    """The configuration cannot be used; ``violations`` lists everything that is wrong."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = list(violations)
        super().__init__(problem_list(map(str, self.violations)))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[Violation]]]:
        return type(self), (self.violations,)


PROBLEM = "  - "
"""Begins the line of each of several problems."""


def problem_list(problems: Iterable[str]) -> str:
    """Join problems: a single one as it is, several as a numbered list."""
    lines = list(problems)
    return lines[0] if len(lines) == 1 else f"\n{PROBLEM}".join([f"{len(lines)} problems:", *lines])


class UnsupportedConfigError(ConfigError, UnsupportedInput):
    """The configuration asks for something that this version does not support."""


def config_error(violations: Iterable[Violation]) -> ConfigError:
    """Return the error of these violations: ``UnsupportedConfigError`` if every one is an unsupported value."""
    found = list(violations)
    unsupported = all(violation.kind is Kind.UNSUPPORTED for violation in found)
    return (UnsupportedConfigError if unsupported else ConfigError)(found)


MOST_INTEGER = 2**31 - 1
"""The largest magnitude of an integer whose setting has no upper limit: it fits every index and counter."""
MOST_NUMBER = 1e30
"""The same of other numbers: a product of a few of them still fits 32 bits."""
MOST_SEED = 2**63 - 1
MOST_SECONDS = 10**8
"""The longest time limit, three years: clocks of the operating system take it."""


class Range(NamedTuple):
    """The range of a setting's values; a limit of None means no limit.

    A number without an upper limit is at most ``MOST_INTEGER`` or ``MOST_NUMBER`` in magnitude, so it is finite.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()
    empty: bool = True
    hint: str = ""

    def holds(self, value: Any) -> bool:
        """Whether ``value``, which has the right type, lies in the range; null always does."""
        if value is None:
            return True
        if self.one_of:
            return value in self.one_of
        if not self.empty and not value:
            return False
        bounds = ((ge, self.at_least), (gt, self.above), (le, self.at_most), (lt, self.below))
        return not self.is_too_large(value) and all(limit is None or holds(value, limit) for holds, limit in bounds)

    def is_too_large(self, value: Any) -> bool:
        """Whether the magnitude of a number exceeds the setting's upper limit or, without one, the common limit."""
        return isinstance(value, int | float) and not abs(value) <= self.most(value)

    def most(self, value: float) -> float:
        """Return the largest magnitude of a number of the type of ``value``."""
        common = MOST_INTEGER if isinstance(value, int) else MOST_NUMBER
        return max(common, self.at_most or 0, self.below or 0)

    def __str__(self) -> str:
        if self.at_most is None and self.below is None:
            if self.above is not None:
                return f"above {_written(self.above)}"
            return "" if self.at_least is None else f"of {_written(self.at_least)} or more"
        upper = f"{_written(self.at_most)}]" if self.at_most is not None else f"{_written(self.below)})"
        if self.at_least is None and self.above is None:
            return f"of at most {upper[:-1]}" if self.below is None else f"below {upper[:-1]}"
        lower = f"[{_written(self.at_least)}" if self.above is None else f"({_written(self.above)}"
        return f"in {lower}, {upper}"


def _written(limit: float | None) -> str:
    """Return a limit as a person would write it, with all digits of an integer."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def setting(
    default: T,
    meaning: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: tuple[Any, ...] = (),
    empty: bool = True,
    hint: str = "",
) -> T:
    """Declare a field of a configuration node: its default, its meaning in one line, and its range.

    The node checks type and range when it is built. ``empty=False`` refuses an empty string, and ``hint`` says in the
    error what else one may want to know. Each node gets a copy of a default that is a list or mapping.
    """
    metadata = {"meaning": meaning, "range": Range(at_least, above, at_most, below, one_of, empty, hint)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def as_yaml(value: Any) -> str:
    """Return a value as one would write it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(as_yaml(item) for item in value)}]"
    return str(value) if value != "" else "''"


def one_line(text: str, most_characters: int = 200) -> str:
    """Return a text as one line of limited length, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= most_characters else f"{line[: most_characters - 3]}..."


_collected: ContextVar[list[Violation] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_violations() -> Iterator[list[Violation]]:
    """Collect violations while nodes are built instead of raising them, so that the parser can list all of them."""
    found: list[Violation] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A node of the configuration.

    A field is set once, by the constructor; later only if ``_mutable_fields`` of its class names it. A subclass that
    has rules yields what breaks them from ``rules``.

    Raises: ConfigError when a value has the wrong type or breaks a rule, FrozenInstanceError on a later assignment.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset()
    _is_closed: ClassVar[bool] = False  # whether a node of this class rejects unknown keys even without ``_target_``
    _is_open: ClassVar[bool] = False  # whether a node accepts unknown keys even if its ``_target_`` names this class
    _replaced: ClassVar[Mapping[str, str]] = {}  # older keys of this node, and what to write instead
    _idle: ClassVar[tuple[Idle, ...]] = ()  # what a recipe adds to ``verl.trainer.config.rules.no_effect``

    _target_: str = ""

    def __post_init__(self) -> None:
        mistyped, beyond = _broken_fields(self)
        violations = [field_violation(type(self), name, self[name]) for name in mistyped + beyond]
        if not mistyped:
            violations += self.rules()
        collected = _collected.get()
        if collected is not None:
            collected += violations
        elif violations:
            raise config_error(violations)

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
        """Return the field ``key``, or ``default`` if there is no such field."""
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
def type_hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is not ClassVar}


def field_violation(cls: type, name: str, value: Any) -> Violation:
    """Describe a value outside its field's type or range."""
    limits = _ranges(cls).get(name, Range())
    hint = f"; {limits.hint}" if limits.hint else ""
    bounds = _describe_range(type_hints(cls)[name], limits)
    if limits.is_too_large(value) and (value < 0 or (limits.at_most is None and limits.below is None)):
        bounds += f", and at most {_written(limits.most(value))} in magnitude"
    return Violation(name, value, f"must be {bounds}{hint}")


class FieldHelp(NamedTuple):
    """The help for a field: its meaning, its type with the legal values, its default."""

    meaning: str
    type: str
    default: Any


def described_field(cls: type[BaseConfig], name: str) -> FieldHelp:
    """Describe a field of a node."""
    found = next(each for each in fields(cls) if each.name == name)
    default = found.default if found.default_factory is MISSING else found.default_factory()
    type_text = _describe_range(type_hints(cls)[name], _ranges(cls).get(name, Range()))
    return FieldHelp(found.metadata.get("meaning", ""), type_text, default)


@cache
def _ranges(cls: type) -> dict[str, Range]:
    return {each.name: each.metadata["range"] for each in fields(cls) if "range" in each.metadata}


def _broken_fields(config: BaseConfig) -> tuple[list[str], list[str]]:
    """Return the fields whose value has the wrong type, and those whose value is outside its range."""
    ranges = _ranges(type(config))
    mistyped = []
    beyond = []
    for name, hint in type_hints(type(config)).items():
        value = config.__dict__.get(name)
        if name not in config.__dict__ or value == "???":
            continue
        if not matches(value, hint):
            mistyped.append(name)
        elif name in ranges and not ranges[name].holds(value):
            beyond.append(name)
    return mistyped, beyond


def _describe_range(hint: Any, limits: Range) -> str:
    """Describe a type with its range, such as "an integer of 1 or more, or null"."""
    if hint is Any or (not str(limits) and not limits.one_of):
        return _describe(hint)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    null = ", or null" if type(None) in kinds else ""
    if limits.one_of:
        choice = "one of " if len(limits.one_of) > 1 else ""
        return f"{'null or ' if null else ''}{choice}{', '.join(map(as_yaml, limits.one_of))}"
    return f"{' or '.join(_describe(kind) for kind in kinds if kind is not type(None))} {limits}{null}"


def matches(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the annotated type. An integer is a float, NaN is no number, and a tuple is a list."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, each) for each in arguments)
    if origin in (list, tuple):
        items = arguments[:1] if arguments else (Any,)
        return isinstance(value, list | tuple) and all(matches(item, items[0]) for item in value)
    if origin is dict or hint is dict:
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value is each for each in arguments)
    if isinstance(value, hint):
        return True
    # A node may be a dataclass of the user, or still a plain mapping if a caller builds only its parent.
    return issubclass(hint, BaseConfig) and (isinstance(value, Mapping) or is_dataclass(value))


def _describe(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(each) for each in arguments)
    if origin is typing.Literal:
        return ", ".join(map(as_yaml, arguments))
    if origin in (list, tuple):
        return f"a list whose items are each {_describe(arguments[0])}" if arguments else "a list"
    return names.get(origin or hint, "a mapping")


# ---- building of nodes from trees


def omega_conf_to_dataclass(config: DictConfig | dict[str, Any] | Any, dataclass_type: type | None = None) -> Any:
    """Build the dataclass of a node: the one that ``_target_`` names, or ``dataclass_type``.

    A ``_target_`` that is no node of the configuration is called as Hydra's ``instantiate`` does.

    Returns: for an empty node the default of ``dataclass_type``, or None. A value that is no node comes back unchanged.
    Raises: ConfigError listing every value that has the wrong type or breaks a rule, and a missing ``_target_``;
        ValueError when ``dataclass_type`` is no dataclass.
    """
    if not config and (config is None or isinstance(config, Mapping)):
        return dataclass_type() if dataclass_type is not None else None
    if not isinstance(config, DictConfig | ListConfig | dict | list):
        return config
    if dataclass_type is None:
        if "_target_" not in config:
            raise ConfigError([Violation("_target_", None, "is missing: name the dataclass of this node")])
        return build_node(config, BaseConfig)
    if not is_dataclass(dataclass_type):
        raise ValueError(f"dataclass_type={dataclass_type!r} must be a dataclass")
    if issubclass(dataclass_type, BaseConfig):
        return build_node({key: value for key, value in _plain(config).items() if key != "_target_"}, dataclass_type)
    structured = OmegaConf.structured(dataclass_type)
    merged = OmegaConf.merge(structured, OmegaConf.create(config) if isinstance(config, dict) else config)
    return OmegaConf.to_object(merged)


def read_fields(cls: type[Plain], node: DictConfig) -> Plain:
    """Build a plain dataclass from a node, which may hold more keys than the dataclass has fields."""
    values: Any = OmegaConf.to_container(node, resolve=True)
    return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def build_node(node: Any, cls: type[Node]) -> Node:
    """Build a dataclass from a node, which may hold further keys; return a dataclass unchanged.

    Raises: ConfigError listing everything that is wrong.
    """
    reader = NodeReader(imports=True)
    built: Node = reader.build(_plain(node), "", cls)
    if reader.violations:
        raise config_error(reader.violations)
    return built


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def parse_node(tree: Tree, cls: type[BaseConfig] | None = None, path: str = "") -> tuple[Any, list[Violation]]:
    """Parse one resolved node; return its dataclass and its violations.

    ``cls`` is its dataclass unless its ``_target_`` names one; ``path`` is the dotted key of the node.
    """
    reader = NodeReader()
    return reader.build(tree, path, cls), reader.violations


class NodeReader:
    """Builds dataclasses from mappings and keeps their violations.

    A node with a ``_target_`` has no other keys than its dataclass, unless that is open; a plain node may hold keys
    that recipes add, unless its dataclass is closed. ``imports`` says whether code of the user runs: a model's node
    imports its ``external_lib``, and a ``_target_`` may be any class or function.
    """

    def __init__(self, imports: bool = False) -> None:
        self.imports = imports
        self.violations: list[Violation] = []
        self.mistyped: list[Violation] = []  # the violations that are values of a wrong type
        self.unknown: list[Violation] = []  # the violations that are keys unknown to the dataclass

    def node(self, tree: Tree, name: str, cls: type[BaseConfig], prefix: str = "") -> Any:
        """Return the node ``name`` of a tree; its defaults, unchecked, if it is absent."""
        value = tree.get(name)
        if isinstance(value, Mapping):
            return self.build(value, f"{prefix}.{name}" if prefix else name, cls)
        return _default(cls)

    def build(self, value: Any, path: str, cls: type[BaseConfig] | None = None) -> Any:
        """Build the dataclass of a mapping; other values are returned unchanged."""
        if not isinstance(value, Mapping) or is_dataclass(value):
            return value
        found = self._target_class(value["_target_"], path) if "_target_" in value else None
        names_class = found is not None
        own = found or cls  # after a wrong class, build the default one, so that other checks can read the node
        if own is None and "_target_" in value:
            return None
        if self.imports and names_class and (not _is_node_class(own) or value.keys() & _HYDRA_KEYS):
            return _instantiate(value)
        is_strict = (names_class and not getattr(own, "_is_open", False)) or (own is not None and own._is_closed)
        hints = {} if own is None else type_hints(own)
        children = {
            key: self.build(child, f"{path}.{key}" if path else str(key), _node_class(hints.get(key)))
            for key, child in value.items()
            if key != "_target_"
        }
        if own is None:
            return children
        known = [each.name for each in fields(own) if each.init]
        more = {key: children.pop(key) for key in list(children) if key not in known}
        before = len(self.unknown)
        for key in more if is_strict else ():
            similar = ", ".join(nearest(key, known)) or "none"
            expected = getattr(own, "_replaced", {}).get(key)
            expected = expected or f"there is no such key; the nearest in this node: {similar}"
            self.unknown.append(Violation(key, value[key], expected).under(path))
        self.violations += self.unknown[before:]
        node = self._made(own, children, path, is_strict)
        if node is not None:
            node.__dict__.update({key: child for key, child in more.items() if not hasattr(node, key)})
        return node

    def _made(self, cls: Any, children: dict[str, Any], path: str, is_strict: bool) -> Any:
        """Build the dataclass from the given values, without values of the wrong type."""
        hints = type_hints(cls) if issubclass(cls, BaseConfig) else {}
        external_lib = None if self.imports else children.pop("external_lib", None)
        self.violations += [violation.under(path) for violation in _external_lib_rules(external_lib)]
        for key in [key for key in hints if key in children]:
            child = children[key]
            if child == "???" or matches(child, hints[key]):
                continue
            del children[key]
            if child is not None or is_strict or _node_class(hints[key]) is None:  # a plain node may be null
                wrong = field_violation(cls, key, child).under(path)
                self.mistyped.append(wrong)
                self.violations.append(wrong)
        with collected_violations() as refused:
            try:
                node = cls(**children)
            except ConfigError as error:  # a class of the user may raise by itself
                refused += error.violations
                node = None
        self.violations += [violation.under(path) for violation in refused]
        if external_lib is not None and node is not None:
            node.__dict__["external_lib"] = external_lib
        return node

    def _target_class(self, target: Any, path: str) -> Any:
        from verl.utils.process.time_limit import import_within_limit

        try:
            found = import_within_limit(lambda: pkgutil.resolve_name(str(target)))
        except RuntimeError as error:
            problem = f"cannot be imported: {one_line(str(error))}: write the dotted name of a dataclass"
        else:
            if self.imports or is_dataclass(found):
                return found
            problem = "must be a dataclass"
        self.violations.append(Violation("_target_", target, problem).under(path))
        return None


def _default(cls: type[BaseConfig]) -> BaseConfig:
    """Return a node with its defaults, even if required values are missing."""
    with collected_violations():
        return cls()


_HYDRA_KEYS = {"_partial_", "_convert_", "_recursive_", "_args_"}


def _instantiate(node: Tree) -> Any:
    """Call the target of a node as Hydra does, but raise a ConfigError of its class without Hydra's wrapper."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="partial")
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


def _node_class(hint: Any) -> type[BaseConfig] | None:
    """Return the dataclass among the types of a field, None if its values are not nodes."""
    return next(filter(_is_node_class, typing.get_args(hint) or (hint,)), None)


def _is_node_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseConfig)


def nearest(key: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the keys most like ``key``: by the whole, and by the last name more than by the path."""
    last = key.rsplit(".", 1)[-1]

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, key, other).ratio()
        return whole + SequenceMatcher(None, last, other.rsplit(".", 1)[-1]).ratio()

    ranked = sorted(known, key=likeness, reverse=True)[:count]
    best = likeness(ranked[0]) if ranked else 0.0
    return [other for other in ranked if likeness(other) > max(0.9, 0.8 * best)]


def _external_lib_rules(external_lib: Any) -> Iterator[Violation]:
    """Yield what is wrong with modules that workers import; here they need only exist."""
    names = [external_lib] if isinstance(external_lib, str) else [] if external_lib is None else external_lib
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        yield Violation("external_lib", external_lib, "must be the name of a module, or a list of names")
        return
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    if missing:
        expected = f"cannot find {', '.join(missing)}: write modules that are installed or on PYTHONPATH"
        yield Violation("external_lib", external_lib, expected)
