"""Import of SGLang: environment, stand-in for its kernels on a CPU, import."""

import asyncio
import importlib
import warnings
from types import ModuleType

from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.sglang import patch
from verl.utils.sglang.installed import FIRST_VERSION, LAST_VERSION, offer_stand_in

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
    patch.standardize_towers()
    return sglang


def _remedy() -> str:
    if get_device_name() == "cpu":
        return "run scripts/setup_env.sh, which installs it for a CPU"
    return f"pip install 'sglang>={FIRST_VERSION},<={LAST_VERSION}' (docs/install.md)"
