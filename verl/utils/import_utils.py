"""Checks for optional packages, and loading of user code."""

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from verl.errors import ExternalModuleError, MissingFile, MissingName, UserImportError, WrongInput
from verl.utils.failures import on_failure
from verl.utils.process.time_limit import import_within_limit

_HOW_TO_IMPORT = "correct it, or install what it imports"
_EXTERNAL = "verl_external_"
"""Begins the name of a module that is loaded from a user's file, which other processes cannot import."""

PACKAGE = "pkg://"
"""Begins the name of an installed module where a path may stand."""

P = ParamSpec("P")
T = TypeVar("T")


@cache
def has_module(name: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package of a dotted name is missing or broken
        return False


def is_installed(package: str) -> bool:
    """Whether a package is installed; a folder without ``__init__.py``, such as the output of a tracker, is none."""
    spec = importlib.util.find_spec(package) if has_module(package) else None
    return spec is not None and spec.origin is not None


@contextlib.contextmanager
def hidden(names: Iterable[str]) -> Iterator[None]:
    """Make imports of these modules fail, except modules that are already imported."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # an import of None fails
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name, hidden) is None:  # otherwise an import has replaced the entry
                del sys.modules[name]


is_megatron_core_available = partial(has_module, "megatron.core")
is_vllm_available = partial(has_module, "vllm")
is_sglang_available = partial(has_module, "sglang")
is_nvtx_available = partial(has_module, "nvtx")
is_trl_available = partial(has_module, "trl")


def lazy_exports(module: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its exports (name -> module) on first use."""

    def load(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(exports[name]), name)

    return load


def forward_assignments(module: str, names: Mapping[str, str]) -> None:
    """Pass assignments to names of a façade on to the modules that read them (name -> module).

    A test or a user's fork that replaces a registry at the façade's path thereby replaces the registry in use.
    """

    class Facade(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name in names:
                setattr(importlib.import_module(names[name]), name, value)
            super().__setattr__(name, value)

    sys.modules[module].__class__ = Facade


def import_external_libs(external_libs: str | list[str] | None = None) -> None:
    """Import modules by name so that they can register their parts.

    Raises: ExternalModuleError naming the module that cannot be imported, whatever it raises.
    """
    if external_libs is None:
        return
    for name in [external_libs] if isinstance(external_libs, str) else external_libs:
        try:
            import_within_limit(partial(importlib.import_module, name))
        except RuntimeError as error:
            text = f"cannot import the external module {name!r}: {error}: {_HOW_TO_IMPORT}"
            raise ExternalModuleError(text) from error.__cause__


def python_file(path: str) -> Path | None:
    """Return the file of a plain path, ``~/...`` or ``file://``; None for an installed module (``pkg://``)."""
    return None if path.startswith(PACKAGE) else Path(path.removeprefix("file://")).expanduser()


def installed_file(path: str) -> Path | None:
    """Return the source of an installed module (``pkg://``) without importing it; None if ``sys.path`` has none."""
    folders: list[str] | None = None
    origin: str | None = None
    for name in path.removeprefix(PACKAGE).replace("/", ".").split("."):
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        if spec is None:
            return None
        folders, origin = list(spec.submodule_search_locations or []), spec.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def dotted_name(path: str | Path) -> str:
    """Return the name under which Python imports a file or a folder; empty if no folder of ``sys.path`` leads there."""
    whole = os.path.splitext(os.path.abspath(path))[0]
    for entry in sorted({os.path.abspath(each) for each in sys.path}, key=len):  # the shortest gives the whole name
        parts = os.path.relpath(whole, entry).split(os.sep)
        if all(part.isidentifier() for part in parts):
            return ".".join(parts)
    return ""


def absolute_name(name: str, folder: str | Path) -> str:
    """Resolve a dotted name relative to ``folder``, with leading dots as in an import statement.

    A recipe names its own classes so, and a copy of it those of the copy: ``..config.MyConfig`` in
    ``recipe/mine/config/mine.yaml`` is ``recipe.mine.config.MyConfig``.

    Raises: WrongInput for a relative name in a folder that Python cannot import from.
    """
    if not name.startswith("."):
        return name
    package = dotted_name(folder)
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:
        where = f"{folder}, which is {package}" if package else f"{folder}, which no folder of PYTHONPATH contains"
        raise WrongInput(f"{name}: is relative to {where}: write the whole name") from None


def is_own(cls: type) -> bool:
    """Whether verl defines this class. A class of the user may override any of its methods."""
    return cls.__module__.startswith("verl.")


def external_module_of(function: Callable[..., object]) -> ModuleType | None:
    """Return the module of a user's file that defines a function or the target of a ``partial``; else None."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__module__", None) or ""
    return sys.modules.get(name) if name.startswith(_EXTERNAL) else None


def _load_file(path: Path, source: bytes | None = None) -> ModuleType:
    if not path.is_file():
        raise MissingFile(f"no Python file at {str(path)!r}: give the path of one")
    # The name contains the path, so files with the same base name stay apart and a file runs once per process.
    name = f"{_EXTERNAL}{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserImportError(f"{str(path)!r} is not a Python module: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    module.__package__ = dotted_name(path).rpartition(".")[0]  # so that its relative imports work
    sys.modules[name] = module
    run: Callable[[], None] = partial(spec.loader.exec_module, module)
    if source is not None:
        run = partial(_execute, source, module, path)
    try:
        with on_failure(lambda error: sys.modules.__delitem__(name)):
            import_within_limit(run)
    except RuntimeError as error:
        raise UserImportError(f"cannot execute {str(path)!r}: {error}: {_HOW_TO_IMPORT}") from error.__cause__
    return module


def _execute(source: bytes, module: ModuleType, path: Path) -> None:
    exec(compile(source, str(path), "exec"), module.__dict__)


def load_extern_type(file_path: str | None, type_name: str | None, source: bytes | None = None) -> Any:
    """Load a name from a file (plain path, with ``~`` or ``file://``) or from an installed module (``pkg://module``).

    Args: ``source`` takes the place of the content of the file, which may have changed since somebody read it.
    Returns: the object; None without a path.
    Raises: MissingFile, UserImportError when the module cannot be executed, MissingName when the name is missing.
    """
    if not file_path:
        return None
    if not type_name:
        raise ValueError(f"name the object to load from {file_path!r}, got {type_name!r}")
    file = python_file(file_path)
    if file is None:
        try:
            name = file_path.removeprefix(PACKAGE).replace("/", ".")
            module = import_within_limit(partial(importlib.import_module, name))
        except RuntimeError as error:
            raise UserImportError(f"cannot import {file_path!r}: {error}: {_HOW_TO_IMPORT}") from error.__cause__
    else:
        module = _load_file(file, source)
    if not hasattr(module, type_name):
        names = sorted(name for name in vars(module) if not name.startswith("_"))
        raise MissingName(f"{file_path!r} has no {type_name!r}; it has {names}")
    return getattr(module, type_name)


def deprecated(replacement: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Warn when a replaced function is called or a replaced class is constructed."""

    def decorate(target: Callable[P, T]) -> Callable[P, T]:
        name = getattr(target, "__qualname__", repr(target))
        text = f"{name} is deprecated" + (f": use {replacement}" if replacement else "")
        inner: Callable[..., T] = getattr(target, "__init__") if inspect.isclass(target) else target  # noqa: B009

        @functools.wraps(inner)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(text, FutureWarning, stacklevel=2)
            return inner(*args, **kwargs)

        if not inspect.isclass(target):
            return warn_and_call
        setattr(target, "__init__", warn_and_call)  # noqa: B010  # an assignment to a method to type checkers
        return target  # type: ignore[return-value]

    return decorate
