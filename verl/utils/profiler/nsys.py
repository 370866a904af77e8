"""Profile with NVIDIA Nsight Systems: Ray wraps the process in ``nsys``, which captures between start and stop calls.

The launching process reads the options for Ray here, so torch is imported only when a capture starts or stops.
"""

import os
import shlex
from collections.abc import Mapping
from typing import Any

from verl.utils.profiler.captures import ProcessTool
from verl.utils.profiler.config import NsightToolConfig


class NsightSystemsProfiler(ProcessTool):
    """Makes one capture per step, or with ``discrete`` one per task; nsys writes its database."""

    def __init__(self, options: NsightToolConfig, role: str) -> None:
        super().__init__(role, options.discrete)

    def begin(self, role: str) -> None:
        """Start the capture."""
        import torch

        torch.cuda.profiler.start()

    def end(self) -> None:
        """Stop the capture."""
        import torch

        torch.cuda.profiler.stop()


def nsight_options(options: Mapping[str, Any], save_path: str | None, name: str) -> dict[str, str]:
    """Return the ``nsys`` options for Ray's runtime environment, which write to ``<save_path>/<name>_<pid>``.

    Ray puts a relative name into its log folder, keeps an absolute one, and passes the command to a shell. The option
    ``output`` becomes ``o``, because Ray would otherwise add its own ``o``. Options without a value are dropped. Ray
    formats values with ``str``, so lists and booleans are written here in the form that nsys reads.
    """
    texts = {"o" if key == "output" else key: _text(value) for key, value in options.items() if value is not None}
    if save_path and "o" not in texts:
        folder = os.path.abspath(os.path.expanduser(save_path))
        texts["o"] = _escaped(os.path.join(folder, f"{name}_%p"))
    return texts


def _text(value: str | int | float | list[Any] | tuple[Any, ...]) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(path: str) -> str:
    """Escape a path for a shell by backslashes; Ray would not take a quoted path for an absolute one."""
    return "".join(char if shlex.quote(char) == char else f"\\{char}" for char in path)
