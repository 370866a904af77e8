"""The options by which Ray has ``nsys`` wrap a process."""

import os
import shlex
from collections.abc import Mapping
from typing import Any


def nsight_options(options: Mapping[str, Any], save_path: str | None, name: str) -> dict[str, Any]:
    """Return options of nsys for Ray's runtime environment, with the file to write, ``<save_path>/<name>_<pid>``.

    Ray puts a relative name into the folder of its logs and leaves an absolute one as it is, and hands the command to
    a shell. A name among the options (``o`` or ``output``) stays.
    """
    options = dict(options)
    if save_path and not {"o", "output"} & options.keys():
        folder = os.path.abspath(os.path.expanduser(save_path))
        options["o"] = _escaped(os.path.join(folder, f"{name}_%p"))
    return options


def _escaped(path: str) -> str:
    """Escape a path for a shell by backslashes; in quotes it would not be absolute to Ray."""
    return "".join(char if shlex.quote(char) == char else f"\\{char}" for char in path)
