"""Import of SGLang: environment, stand-in for its kernels on a CPU, import."""

import asyncio
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.engine_versions import FIRST_SGLANG, LAST_SGLANG, SGLANG_STAND_IN, has_sglang_kernels
from verl.workers.rollout.sglang_rollout import patch

STAND_IN = Path(__file__).parent / SGLANG_STAND_IN
"""The folder of ``sgl_kernel``, which only makes imports succeed where SGLang has no kernels."""

_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # else SGLang looks for a GPU, and asks vLLM for kernels
    "TORCHDYNAMO_DISABLE": "1",  # compiling penalties takes half a minute at the first request that has one
}


def import_sglang() -> ModuleType:
    """Import SGLang, with the environment for an engine of this process; repeated calls are cheap.

    The processes of an engine inherit the environment, and multiprocessing gives them ``sys.path``.

    Raises: ImportError naming the package to install.
    """
    if get_device_name() == "cpu":
        envs.write_default(_CPU_ENVIRONMENT)
        offer_stand_in()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")  # warnings about what a CPU lacks
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
    patch.standardize_towers()
    return sglang


def offer_stand_in() -> None:
    """Append the stand-in to ``sys.path`` where no kernel package is installed."""
    if str(STAND_IN) not in sys.path and not has_sglang_kernels():
        sys.path.append(str(STAND_IN))


def _remedy() -> str:
    if get_device_name() == "cpu":
        return "run scripts/setup_env.sh, which installs it for a CPU"
    return f"pip install 'sglang>={FIRST_SGLANG},<={LAST_SGLANG}' (docs/install.md)"
