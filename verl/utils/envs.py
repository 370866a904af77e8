"""Access to environment variables; all of verl reads and writes them here."""

import os
from collections.abc import Mapping, MutableMapping

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


def read(name: str, default: str | None = None) -> str | None:
    """Return the value of ``name``, or ``default`` if it is not set."""
    return os.environ.get(name, default)


def flag(name: str, default: bool = False) -> bool:
    """Return ``name`` as a boolean.

    Raises: ValueError when the value is neither true nor false.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError(f"environment variable {name}={value!r} is not a boolean: write 1 or 0")


def integer(name: str, default: int) -> int:
    """Return ``name`` as an integer.

    Raises: ValueError when the value is not one.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"environment variable {name}={value!r} is not an integer: write one, or unset it") from None


def write(values: Mapping[str, str]) -> None:
    """Set every given variable in this process and its future children."""
    os.environ.update({name: str(value) for name, value in values.items()})


def write_default(values: Mapping[str, str]) -> None:
    """Set the given variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def remove(name: str) -> str | None:
    """Unset ``name`` and return its old value."""
    return os.environ.pop(name, None)


def mapping() -> MutableMapping[str, str]:
    """Return the live environment of this process."""
    return os.environ
