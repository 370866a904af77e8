"""Build every dataclass node of a resolved tree, and collect what each refuses."""

import importlib.util
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from verl.base_config import BaseConfig, ConfigError, Violation
from verl.trainer.config.keys import nearest

_FAILED = object()


def build_nodes(tree: Mapping[str, Any]) -> tuple[dict[str, BaseConfig], list[Violation]]:
    """Return the dataclasses by dotted key, those that refuse their values left out, and the violations."""
    nodes: dict[str, BaseConfig] = {}
    violations: list[Violation] = []
    _build(tree, "", nodes, violations)
    return nodes, violations


def _build(value: Any, path: str, nodes: dict[str, BaseConfig], violations: list[Violation]) -> Any:
    if not isinstance(value, Mapping):
        return value
    children = {
        key: _build(child, f"{path}.{key}" if path else str(key), nodes, violations)
        for key, child in value.items()
        if key != "_target_"
    }
    # What refused its own values counts as absent for the node around it.
    children = {key: child for key, child in children.items() if child is not _FAILED}
    if "_target_" not in value:
        return children
    cls = _target_class(value["_target_"], path, violations)
    if cls is None:
        return _FAILED
    known = [field.name for field in fields(cls) if field.init]
    for key in [key for key in children if key not in known]:
        similar = ", ".join(nearest(key, known)) or "none"
        expected = f"there is no such key; the nearest in this node: {similar}"
        violations.append(Violation(f"{path}.{key}", children.pop(key), expected))
    if "external_lib" in children:  # workers import it; here it need only exist
        violations.extend(_external_lib_violations(path, children.pop("external_lib")))
    try:
        nodes[path] = cls(**children)
    except ConfigError as error:
        violations.extend(violation.under(path) for violation in error.violations)
        return _FAILED
    return nodes[path]


def _target_class(target: Any, path: str, violations: list[Violation]) -> Any:
    from hydra.utils import get_class

    try:
        cls = get_class(str(target))
    except Exception as error:  # Hydra wraps every failure of an import of the user's own module
        violations.append(Violation(f"{path}._target_", target, f"cannot be imported: {error}"))
        return None
    if not is_dataclass(cls):
        violations.append(Violation(f"{path}._target_", target, "must be a dataclass"))
        return None
    return cls


def _external_lib_violations(path: str, external_lib: Any) -> list[Violation]:
    names = [external_lib] if isinstance(external_lib, str) else [] if external_lib is None else external_lib
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        return [Violation(f"{path}.external_lib", external_lib, "must be the name of a module, or a list of names")]
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    expected = f"cannot find {', '.join(missing)}: write modules that are installed or on PYTHONPATH"
    return [Violation(f"{path}.external_lib", external_lib, expected)] if missing else []
