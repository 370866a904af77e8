"""The installed SGLang: its version, its kernels, and the stand-in for missing kernels."""

import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path

from packaging.version import Version

STAND_IN = Path(__file__).parent / "standin"
"""The folder of ``sgl_kernel``, which only makes imports succeed where SGLang has no kernels."""

FIRST_VERSION = Version("0.5.21")
LAST_VERSION = Version("0.5.23")
"""The versions that this code has run with; ``patch`` changes SGLang only between them."""


def installed_version() -> str | None:
    """Return the version of SGLang, None if it is absent."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_kernels() -> bool:
    """Return whether SGLang's kernel package is installed; the stand-in does not count."""
    stand_in = str(STAND_IN)
    path = [entry for entry in sys.path if entry != stand_in]
    return importlib.machinery.PathFinder.find_spec("sgl_kernel", path) is not None


def offer_stand_in() -> None:
    """Append the stand-in to ``sys.path`` where no kernel package is installed."""
    if str(STAND_IN) not in sys.path and not has_kernels():
        sys.path.append(str(STAND_IN))
