"""Import of SGLang: environment, stand-in for its kernels on a CPU, import."""

import asyncio
import importlib
import importlib.machinery
import importlib.metadata
import sys
import warnings
from pathlib import Path
from types import ModuleType

from packaging.version import Version

from verl.utils import envs
from verl.utils.device import get_device_name

STAND_IN = Path(__file__).parent / "standin"
"""The folder of ``sgl_kernel``, which only makes imports succeed where SGLang has no kernels."""

FIRST_VERSION, LAST_VERSION = Version("0.5.21"), Version("0.5.23")
"""The versions that this code has run with; ``patch`` changes SGLang only between them."""

_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # else SGLang looks for a GPU, and asks vLLM for kernels
    "TORCHDYNAMO_DISABLE": "1",  # compiling penalties takes half a minute at the first request that has one
}


def installed_version() -> str | None:
    """Return the version of SGLang, None if it is absent."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def import_sglang() -> ModuleType:
    """Import SGLang, with the environment for an engine of this process; repeated calls are cheap.

    The processes of an engine inherit the environment, and multiprocessing gives them ``sys.path``.

    Raises: ImportError naming the package to install.
    """
    if get_device_name() == "cpu":
        envs.write_default(_CPU_ENVIRONMENT)
        _offer_stand_in()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")  # about what a CPU lacks
    policy = asyncio.get_event_loop_policy()
    try:
        sglang = importlib.import_module("sglang")
        importlib.import_module("sglang.srt.entrypoints.engine")
    except ImportError as error:
        raise ImportError(
            f"actor_rollout_ref.rollout.name=sglang needs SGLang, which cannot be imported ({error}): {_remedy()}, or "
            "set rollout.name=vllm"
        ) from error
    finally:
        asyncio.set_event_loop_policy(policy)  # SGLang sets its own, for all loops of this process
    from verl.utils.sglang import patch  # which needs this module

    patch.standardize_towers()
    return sglang


def has_kernels() -> bool:
    """Return whether SGLang's kernel package is installed; the stand-in does not count."""
    stand_in = str(STAND_IN)
    path = [entry for entry in sys.path if entry != stand_in]
    return importlib.machinery.PathFinder.find_spec("sgl_kernel", path) is not None


def _offer_stand_in() -> None:
    """Append the stand-in to ``sys.path`` where no kernel package is installed."""
    if str(STAND_IN) not in sys.path and not has_kernels():
        sys.path.append(str(STAND_IN))


def _remedy() -> str:
    if get_device_name() == "cpu":
        return "run scripts/setup_env.sh, which installs it for a CPU"
    return f"pip install 'sglang>={FIRST_VERSION},<={LAST_VERSION}' (docs/install.md)"
