"""Established path of vLLM's names; vLLM itself is imported by the vLLM rollout, at the first use of one."""

import importlib
from typing import TYPE_CHECKING, Any

from verl.utils.device import is_npu_available
from verl.utils.engine_versions import installed_version, is_version_ge

if TYPE_CHECKING:
    from vllm import LLM as LLM
    from vllm.distributed import parallel_state as parallel_state

__all__ = ["LLM", "parallel_state"]

vllm_version: str | None = installed_version("vllm")
VLLM_SLEEP_LEVEL = 2 if is_version_ge("vllm", "0.8.5") and not is_npu_available else 1
"""The level of sleep that frees the weights too, where vLLM has it."""


def __getattr__(name: str) -> Any:
    """Import ``LLM`` or ``parallel_state`` when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.vllm_rollout.importing import import_vllm

    vllm = import_vllm()
    return vllm.LLM if name == "LLM" else importlib.import_module("vllm.distributed.parallel_state")
