"""Compare installed and required versions of vLLM and SGLang, and find SGLang's kernels, without imports."""

import contextlib
import importlib.machinery
import importlib.metadata
import logging
import sys
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

from verl.errors import WrongInput

STANDALONE = "standalone"
"""The mode of engines on devices that no trainer uses (``hybrid_engine=false``); ``rollout.mode`` has the others."""

LOWEST_VLLM = {"sync": "0.25", "async": "0.28", STANDALONE: "0.32"}
"""By the mode, the first version of vLLM with everything that it calls; ``scripts/engine_attributes.py`` checks it."""

LOWEST_ON_CPU = "0.32"
"""The lowest version of vLLM that the patches for a CPU support: the version of the extra ``cpu``."""

FIRST_SGLANG = Version("0.5.21")
LAST_SGLANG = Version("0.5.23")
"""The versions of SGLang that verl has run with; it patches most of SGLang only between them."""

SGLANG_STAND_IN = "cpu_standin"
"""The folder with our stand-in for ``sgl_kernel``, by which a CPU without SGLang's kernels imports SGLang."""

_ABSENT_TAG = (0, 1)
"""The release that vLLM gives itself if it is built from a clone without tags."""

_warn_once = cache(logging.getLogger(__name__).warning)


def installed_version(pkg: str = "vllm") -> str | None:
    """Return the installed version of ``pkg``, or else of its CPU build ``<pkg>-cpu``; None if neither is installed."""
    for name in (pkg, f"{pkg}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def is_version_ge(pkg: str = "vllm", minver: str = "0.7.3") -> bool:
    """Whether an installed package has at least a version; False if it is not installed."""
    version = installed_version(pkg)
    return version is not None and Version(version) >= Version(minver)


def has_sglang_kernels() -> bool:
    """Whether SGLang's kernel package is installed; the stand-in does not count."""
    path = [entry for entry in sys.path if Path(entry).name != SGLANG_STAND_IN]
    return importlib.machinery.PathFinder.find_spec("sgl_kernel", path) is not None


def check_vllm(mode: str, key: str = "actor_rollout_ref.rollout.name") -> None:
    """Check that the installed vLLM is new enough for a mode; ``key`` is the dotted key of the engine's name.

    A version that cannot be compared, such as that of a build from a clone without tags, gets a notice.

    Raises: WrongInput naming the mode, the version and what to install.
    """
    installed = installed_version()
    if installed is None:
        return
    lowest = LOWEST_VLLM[mode]
    release = _release(installed)
    if release is None:
        _warn_once("vLLM %s cannot be compared with a release: a rollout in mode %s needs %s", installed, mode, lowest)
    elif release < Version(lowest).release:
        fitting = [other for other, version in LOWEST_VLLM.items() if Version(version).release <= release]
        instead = f", or use the mode {' or '.join(fitting)}" if fitting else ""
        raise WrongInput(
            f"{key}=vllm: the mode {mode} needs vLLM {lowest} or newer, and {installed} is installed: install "
            f"'vllm>={lowest}'{instead}"
        )


def is_older_vllm(version: str) -> bool:
    """Whether the installed vLLM is older than a version; one that cannot be compared is not."""
    release = _release(installed_version() or "")
    return release is not None and release < Version(version).release


def _release(version: str) -> tuple[int, ...] | None:
    """Return the release of a version, of which a preview counts as the release; None if it has none."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return None if release[:2] == _ABSENT_TAG else release
