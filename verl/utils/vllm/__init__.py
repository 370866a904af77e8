"""Import path of the established verl interface for ``is_version_ge``."""

from verl.utils.engine_versions import is_version_ge as is_version_ge
