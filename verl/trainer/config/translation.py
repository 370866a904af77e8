"""Translate the keys of other versions, on the command line and in files of the user, before Hydra composes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from verl.base_config import Violation, as_yaml
from verl.trainer.config.keys import dotted_keys, is_under, referenced_keys, select
from verl.trainer.config.other_versions import ENGINE_OF_FILES, ROWS, Row, Translator, Untranslatable, row_of
from verl.utils.json_types import Json

logger = logging.getLogger(__name__)


class Sweep(str):
    """Several values of one key, in the syntax of ``--multirun``."""


def file_of_engine(overrides: Iterable[str], config_name: str, folder: str) -> str:
    """Return the configuration file of ``model_engine``, next to ``config_name``, which the user has not named."""
    other = config_name.replace("_trainer", "_megatron_trainer")
    asks = f"{ENGINE_OF_FILES}=megatron" in [line.lstrip("+") for line in overrides]
    return other if asks and "megatron" not in config_name and Path(folder, f"{other}.yaml").is_file() else config_name


class Translation:
    """The translation of other versions' keys in a command's overrides and in its composed files.

    ``known`` are the keys of the files that come with the command: what these files have is no key of another version.
    ``reads`` tells whether code of the user reads what an override adds.
    """

    def __init__(
        self,
        overrides: Iterable[Override],
        tree: Mapping[str, Json],
        known: Iterable[str],
        reads: Callable[[Override], bool],
    ) -> None:
        self.tree = tree
        self.known = set(known) & set(dotted_keys(tree))
        self.overrides: list[str] = []
        """Those of the user that set keys of this version."""
        self.before: list[str] = []
        """Overrides to apply before them."""
        self.violations: list[Violation] = []
        self._said: list[str] = []
        self._ours: dict[str, Json] = {}
        self._written: set[str] = set()
        given: dict[str, Json] = {}
        references = referenced_keys(tree)
        for key, value in _leaves(tree):
            if self._row(key, value) is not None and not any(is_under(each, [key]) for each in references):
                given[key] = value
        self.in_files = _tops(given, tree)
        """The highest keys of files that hold nothing but keys of other versions."""
        for override in overrides:
            given |= self._divided(override, reads(override))
        self._translate(given)
        self.before[:0] = [f"~{key}" for key in self.in_files]

    def tell(self) -> None:
        """Print the translated keys, each with ours."""
        if self._said:
            logger.warning("keys of another version: %s", "; ".join(dict.fromkeys(self._said)))

    def _divided(self, override: Override, is_read: bool) -> dict[str, Json]:
        """Keep the part of an override that sets keys of this version, and return the other part."""
        given = dict(_given(override))
        rows = {key: self._row(key, value) for key, value in given.items()}
        theirs = {key: given[key] for key, row in rows.items() if row is not None and not (is_read and row.roots)}
        rest = {key: value for key, value in given.items() if key not in theirs}
        self._ours |= rest
        self._written |= {*given}
        if not theirs:
            self.overrides.append(str(override.input_line))
        else:
            self.overrides += [f"++{key}={hydra_text(value)}" for key, value in rest.items()]
        return theirs

    def _row(self, key: str, value: Json) -> Row | None:
        return row_of_other_version(key, value, self.tree, self.known)

    def _translate(self, given: Mapping[str, Json]) -> None:
        together: dict[Translator, dict[str, Json]] = {}
        for key, value in given.items():
            row = self._row(key, value)
            if row is None or (value in (None, {}) and not row.takes_null) or _is_off(key, given):
                continue
            if callable(row.to):
                together.setdefault(row.to, {})[key] = value
            elif row.to is not None:
                self._write({f"{row.to}{key[len(row.key) :]}": value}, {key: value})
            elif not row.needs_nothing(key, value):
                self._refuse(row, key, value)
            elif row.notice:
                self._said.append(f"{row.key}: {row.notice}")
        for to in sorted(together, key=[row.to for row in ROWS].index):
            self._translate_together(to, together[to])

    def _refuse(self, row: Row, key: str, value: Json) -> None:
        """Note a key that cannot be translated; of an older name the node, once."""
        if row.roots:
            self.violations.append(Violation(key, value, row.message))
        elif row.key not in [each.key for each in self.violations]:
            self.violations.append(Violation(row.key, select(self.tree, row.key, value), row.message))

    def _translate_together(self, to: Translator, given: dict[str, Json]) -> None:
        try:
            if several := next((key for key, value in given.items() if isinstance(value, Sweep)), None):
                raise Untranslatable(several, "is a key of another version: write one value")
            translated = to(given, self._read)
        except Untranslatable as error:
            self.violations.append(Violation(error.key, given.get(error.key), error.expected))
            return
        implied = {key: value for key, value in translated.implied.items() if key not in self._ours}
        self.before += [f"++{key}={hydra_text(value)}" for key, value in implied.items()]
        self._write(dict(translated.values), given, implied)
        self._said += [f"{key}={as_yaml(given[key])}: {text}" for key, text in translated.notices.items()]

    def _write(
        self, values: dict[str, Json], given: Mapping[str, Json], implied: Mapping[str, Json] | None = None
    ) -> None:
        """Set the present keys, unless the command line sets one of them to another value."""
        said = ", ".join(f"{key}={as_yaml(value)}" for key, value in given.items())
        for key, value in values.items():
            is_twice = key in self._ours and not self._written.isdisjoint(given)
            if is_twice and self._ours[key] != value:
                expected = f"contradicts {said}, which sets the same: write one of the two"
                self.violations.append(Violation(key, self._ours[key], expected, others=tuple(given)))
        self.before += [f"++{key}={hydra_text(value)}" for key, value in values.items()]
        self._ours = values | self._ours
        if values:
            written = " ".join(f"{key}={as_yaml(value)}" for key, value in {**values, **(implied or {})}.items())
            self._said.append(f"{said} is {written}")

    def _read(self, key: str) -> Json:
        return self._ours[key] if key in self._ours else select(self.tree, key)


def row_of_other_version(key: str, value: Json, tree: Mapping[str, Json], known: Iterable[str]) -> Row | None:
    """Return the row of a key of another version; None if there is none.

    A node that is null or empty gets one of the rows of the keys below it.
    """
    row = row_of(key, value, tree)
    if row is None and value in (None, {}) and key not in known:
        return next((row for row in ROWS if row.key.startswith(f"{key}.") and not row.is_ours), None)
    is_ours = row is None or row.is_ours or (key in known and not row.only)
    return None if is_ours else row


def _is_off(key: str, given: Mapping[str, Json]) -> bool:
    """Whether a node around a key is switched off by a key of another version."""
    names = key.split(".")
    nodes = [".".join(names[:end]) for end in range(1, len(names))]
    switches = [f"{node}.{switch}" for node in nodes for switch in ("enable", "enabled")]
    return any(switch != key and given.get(switch) is False for switch in switches)


def _given(override: Override) -> Iterator[tuple[str, Json]]:
    """Yield the keys that an override sets, and their values; a pair of bounds such as 0.5_2 is no number."""
    key = override.key_or_group
    text = str(override.input_line).partition("=")[2].strip()
    if override.is_delete():
        yield key, None
    elif override.is_sweep_override():
        yield key, Sweep(text)
    elif isinstance(value := _value(override), Mapping) and value:
        yield from _leaves(value, f"{key}.")
    else:
        is_pair = isinstance(value, float) and "_" in text
        yield key, text if is_pair else value


def _value(override: Override) -> Json:
    value: Any = override.value()  # a sweep has a list of choices
    return value


def _leaves(node: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield each leaf of a tree: its dotted key and its value."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tops(keys: Mapping[str, Json], tree: Mapping[str, Json]) -> list[str]:
    """Replace keys by the highest nodes of a tree that hold only such keys."""
    left = {node for key, _ in _leaves(tree) if key not in keys for node in _above(key)}
    return [*dict.fromkeys(next(node for node in _above(key) if node not in left) for key in keys)]


def _above(key: str) -> list[str]:
    """Return the nodes around a key, the highest first, and the key."""
    names = key.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]


def hydra_text(value: Json) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, Sweep):
        return value
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{hydra_text(str(key))}:{hydra_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
    return as_yaml(value)
