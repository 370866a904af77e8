"""Version checks of the installed transformers."""

import importlib.metadata

from packaging.version import Version


def is_transformers_version_in_range(min_version: str | None = None, max_version: str | None = None) -> bool:
    """Whether the installed version is between two versions, both included.

    Raises: ImportError if transformers is not installed.
    """
    installed = Version(importlib.metadata.version("transformers"))
    above = min_version is None or Version(min_version) <= installed
    return above and (max_version is None or installed <= Version(max_version))
