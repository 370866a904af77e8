"""Reinforcement learning for language and vision-language models."""

import sys
from typing import TYPE_CHECKING, Any

from verl.starting import leave_at_once_while_importing

if TYPE_CHECKING:
    from verl.protocol import DataProto as DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> Any:
    """Import ``DataProto``, and torch with it, when it is first asked for."""
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_external_modules() -> None:
    from verl.utils import envs
    from verl.utils.import_utils import import_external_libs

    names = envs.read("VERL_USE_EXTERNAL_MODULES")
    if not names:
        return
    try:
        import_external_libs([name.strip() for name in names.split(",") if name.strip()])
    except Exception as error:  # a module of the user may raise anything
        if sys.argv[0] != "-m":  # as it is while ``python -m`` looks for its module
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"VERL_USE_EXTERNAL_MODULES={names}: {reason}: write modules that are on PYTHONPATH\n")
        sys.exit(2)


leave_at_once_while_importing()
_import_external_modules()
