"""YAML files of the user that name classes and their configuration: tools and interactions."""

import importlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import BaseConfig, config_error, nearest, one_line, parse_node
from verl.errors import WrongInput
from verl.utils.failures import replacing_errors
from verl.utils.import_utils import absolute_name, is_own
from verl.utils.json_types import Json, JsonObject
from verl.utils.parsing import parse_yaml
from verl.utils.process.time_limit import TimeLimitExceeded, error_text, import_within_limit, time_limit

T = TypeVar("T")
Options = TypeVar("Options", bound=BaseConfig)
READ_TIMEOUT_S = 20.0
_HANDLED = ("type", "name")
"""Keys of ``config`` that whoever makes the class handles."""


@dataclass(frozen=True)
class ClassItem:
    """An item of a file of classes: the class that it names, its ``config``, and its other keys.

    ``where`` names file and item, for messages.
    """

    where: str
    class_name: str
    config: JsonObject
    rest: dict[str, Any]


def read_class_items(path: str, key: str, example: str, keys: Collection[str]) -> list[ClassItem]:
    """Return the items of the list under ``key``.

    Args:
        example: an item that could stand there, for messages.
        keys: the other keys that an item may have besides ``class_name`` and ``config``.

    Raises: WrongInput naming the file, the item, the key, and the correction.
    """
    wanted = f"write {key}: with one item for each, such as {{{example}}}"
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            parse_yaml(file.read())  # refuses what OmegaConf would write out without end
        with time_limit(READ_TIMEOUT_S):  # texts of ${...} can double at each step
            content = OmegaConf.to_container(OmegaConf.load(os.path.expanduser(path)), resolve=True)
    except TimeLimitExceeded:
        raise WrongInput(f"{path}: its values do not end within {READ_TIMEOUT_S:g} s: {wanted}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise WrongInput(f"{path}: cannot be read as YAML: {one_line(str(error))}: {wanted}") from error
    items = content.get(key) if isinstance(content, dict) else None
    if not isinstance(items, list) or not items:
        raise WrongInput(f"{path}: has no list under {key!r}: {wanted}")
    made = [_item(f"{path}, {key}[{number}]", item, example, keys) for number, item in enumerate(items)]
    folder = os.path.dirname(os.path.expanduser(path))
    return [replace(item, class_name=absolute_name(item.class_name, folder)) for item in made]


def _item(where: str, item: Any, example: str, keys: Collection[str]) -> ClassItem:
    if not isinstance(item, dict):
        raise WrongInput(f"{where}: is no mapping: write {{{example}}}")
    known = {"class_name", "config", *keys}
    for key in item:
        if key not in known:
            near = ", ".join(nearest(str(key), known)) or ", ".join(sorted(known))
            raise WrongInput(f"{where}: the key {key!r} is unknown: write {near}, or remove it")
    name = item.get("class_name")
    if not isinstance(name, str) or "." not in name.strip("."):
        raise WrongInput(f"{where}.class_name={name!r}: write the dotted name of a class, such as {{{example}}}")
    config = item.get("config")
    if config is not None and not isinstance(config, dict):
        raise WrongInput(f"{where}.config={one_line(str(config))}: write a mapping, {{}} for none")
    rest = {key: value for key, value in item.items() if key not in ("class_name", "config")}
    return ClassItem(where, name, config or {}, rest)


def import_class(item: ClassItem, base: type[T]) -> type[T]:
    """Import the class that an item names, which must be a subclass of ``base``.

    Raises: WrongInput naming the item, whatever the import raises.
    """
    module_name, _, name = item.class_name.rpartition(".")
    where = f"{item.where}.class_name={item.class_name}"
    try:
        module = import_within_limit(partial(importlib.import_module, module_name))
    except RuntimeError as error:
        raise WrongInput(
            f"{where}: its module cannot be imported ({one_line(str(error))}): correct the name, or install it"
        ) from error
    found = getattr(module, name, None)
    subclasses = [
        each
        for each, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    if found is None:
        near = ", ".join(nearest(name, subclasses) or sorted(subclasses)) or "none"
        raise WrongInput(f"{where}: {module_name} has no {name}: write one of its classes: {near}")
    if not isinstance(found, type) or not issubclass(found, base):
        raise WrongInput(f"{where}: is no subclass of {base.__module__}.{base.__qualname__}: derive it from that class")
    return found


def build(item: ClassItem, make: Callable[[], T]) -> T:
    """Return the result of ``make`` for an item.

    Raises: WrongInput naming the item, whatever the class raises.
    """

    def named(error: Exception) -> WrongInput:
        if isinstance(error, WrongInput):
            return WrongInput(f"{item.where}: {error}")
        cause = one_line(error_text(error))
        return WrongInput(f"{item.where}: {item.class_name} cannot be made ({cause}): correct config")

    with replacing_errors(named):
        return make()


def read_options(owner: object, config: Mapping[str, Json], options: type[Options]) -> Options:
    """Return the ``config`` of a class, typed and checked. A class of the user may have further keys.

    Raises: ConfigError naming each key.
    """
    known = {key: value for key, value in config.items() if key not in _HANDLED}
    if not is_own(type(owner)):
        names = {each.name for each in fields(options)}
        known = {key: value for key, value in known.items() if key in names}
    node, violations = parse_node(known, options, "config")
    if violations:
        raise config_error(violations)
    read: Options = node
    return read
