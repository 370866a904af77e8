"""Build dataclasses from nodes of the configuration tree."""

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.base_config import (
    BaseConfig,
    ConfigError,
    Violation,
    collected_violations,
    config_error,
    field_violation,
    matches,
    type_hints,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Node = TypeVar("Node", bound=BaseConfig)
Tree = Mapping[str, Any]


def omega_conf_to_dataclass(config: DictConfig | dict[str, Any] | Any, dataclass_type: type | None = None) -> Any:
    """Build the dataclass of a node: the one that ``_target_`` names, or ``dataclass_type``.

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
    structured = OmegaConf.structured(dataclass_type)
    merged = OmegaConf.merge(structured, OmegaConf.create(config) if isinstance(config, dict) else config)
    return OmegaConf.to_object(merged)


def read_fields(cls: type[T], node: DictConfig) -> T:
    """Build a plain dataclass from a node, which may hold more keys than the dataclass has fields."""
    values: Any = OmegaConf.to_container(node, resolve=True)
    return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def build_node(node: Any, cls: type[Node]) -> Node:
    """Build a dataclass from a node, which may hold more keys; a dataclass comes back as it is.

    Raises: ConfigError listing everything that is wrong.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    reader = NodeReader(imports=True)
    built: Node = reader.build(plain, "", cls)
    if reader.violations:
        raise config_error(reader.violations)
    return built


def parse_node(tree: Tree, cls: type[BaseConfig] | None = None, path: str = "") -> tuple[Any, list[Violation]]:
    """Parse one resolved node and return it with what it refuses.

    ``cls`` is its dataclass unless its ``_target_`` names one; ``path`` is the dotted key of the node.
    """
    reader = NodeReader()
    return reader.build(tree, path, cls), reader.violations


class NodeReader:
    """Builds dataclasses from mappings and keeps what they refuse.

    A node with a ``_target_`` has no other keys than its dataclass; a plain node may hold keys that recipes add, unless
    its dataclass is closed. ``imports`` says whether building a model's node imports its ``external_lib``.
    """

    def __init__(self, imports: bool = False) -> None:
        self.imports = imports
        self.violations: list[Violation] = []
        self.mistyped: list[Violation] = []  # those among them whose value has the wrong type

    def node(self, tree: Tree, name: str, cls: type[BaseConfig], prefix: str = "") -> Any:
        """Return the node ``name`` of a tree; its defaults, unchecked, if it is absent."""
        value = tree.get(name)
        if isinstance(value, Mapping):
            return self.build(value, f"{prefix}.{name}" if prefix else name, cls)
        return _default(cls)

    def build(self, value: Any, path: str, cls: type[BaseConfig] | None = None) -> Any:
        """Return the dataclass of a mapping, or what is not a node with the nodes in it."""
        if not isinstance(value, Mapping) or is_dataclass(value):
            return value
        names_class = "_target_" in value
        own = self._target_class(value["_target_"], path) if names_class else cls
        if names_class and own is None:
            return None if cls is None else _default(cls)
        is_strict = names_class or (own is not None and own._is_closed)
        hints = {} if own is None else type_hints(own)
        children = {
            key: self.build(child, f"{path}.{key}" if path else str(key), _node_class(hints.get(key)))
            for key, child in value.items()
            if key != "_target_"
        }
        if own is None:
            return children
        known = [each.name for each in fields(own) if each.init]
        for key in [key for key in children if key not in known]:
            del children[key]
            if is_strict:
                similar = ", ".join(nearest(key, known)) or "none"
                expected = f"there is no such key; the nearest in this node: {similar}"
                self.violations.append(Violation(key, value[key], expected).under(path))
        return self._made(own, children, path, is_strict)

    def _made(self, cls: Any, children: dict[str, Any], path: str, is_strict: bool) -> Any:
        """Return the dataclass of the given values, without those of the wrong type."""
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
        from hydra.utils import get_class

        try:
            cls = get_class(str(target))
        except Exception as error:  # Hydra wraps every failure of an import of the user's own module
            problem = f"cannot be imported: {error}"
        else:
            if is_dataclass(cls):
                return cls
            problem = "must be a dataclass"
        self.violations.append(Violation("_target_", target, problem).under(path))
        return None


def _default(cls: type[BaseConfig]) -> BaseConfig:
    """Return a node with its defaults, also if they lack what must be given."""
    with collected_violations():
        return cls()


def _node_class(hint: Any) -> type[BaseConfig] | None:
    """Return the dataclass among the types of a field, None if its values are not nodes."""
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, type) and issubclass(kind, BaseConfig):
            return kind
    return None


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
