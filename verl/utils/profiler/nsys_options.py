"""The options by which Ray has ``nsys`` wrap a process."""

import os
import shlex
from collections.abc import Mapping
from typing import Any


def nsight_options(options: Mapping[str, Any], save_path: str | None, name: str) -> dict[str, str]:
    """Return options of nsys for Ray's runtime environment, with the file to write, ``<save_path>/<name>_<pid>``.

    Ray puts a relative name into the folder of its logs and leaves an absolute one as it is, and hands the command to
    a shell. A name among the options (``o`` or ``output``) stays, as ``o``, which Ray would add to the other. Options
    without a value are left out; Ray takes values as they are, so that they are written here as nsys reads them.
    """
    texts = {"o" if key == "output" else key: _text(value) for key, value in options.items() if value is not None}
    if save_path and "o" not in texts:
        folder = os.path.abspath(os.path.expanduser(save_path))
        texts["o"] = _escaped(os.path.join(folder, f"{name}_%p"))
    return texts


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(path: str) -> str:
    """Escape a path for a shell by backslashes; in quotes it would not be absolute to Ray."""
    return "".join(char if shlex.quote(char) == char else f"\\{char}" for char in path)
