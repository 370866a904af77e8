"""The accelerator of this process and the backend of its process groups."""

import re
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from verl.utils import envs


@cache
def _npu_available() -> bool:
    try:
        import torch_npu
    except ImportError:
        return False
    return bool(torch_npu.npu.is_available())


is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = _npu_available()


def get_device_name() -> str:
    """Return ``cuda``, ``npu`` or ``cpu``."""
    return "cuda" if is_cuda_available else "npu" if is_npu_available else "cpu"


def get_torch_device() -> ModuleType:
    """Return ``torch.cuda``, ``torch.npu`` or ``torch.cpu``."""
    return getattr(torch, get_device_name())


def get_device_id() -> int | str:
    """Return the index of the current device, or ``cpu`` without an accelerator."""
    return "cpu" if get_device_name() == "cpu" else get_torch_device().current_device()


def current_device() -> torch.device:
    """Return the device of this process, with its index if it is an accelerator."""
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, int(get_device_id()))


def get_nccl_backend() -> str:
    """Return the collective library of the device: ``nccl``, ``hccl`` or ``gloo``."""
    return {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[get_device_name()]


def get_process_group_backend() -> str:
    """Return the backend string of a group that serves the device and host tensors."""
    name = get_device_name()
    return "gloo" if name == "cpu" else f"cpu:gloo,{name}:{get_nccl_backend()}"


def get_visible_devices_keyword() -> str:
    """Return the variable that hides devices from a process."""
    return "ASCEND_RT_VISIBLE_DEVICES" if is_npu_available else "CUDA_VISIBLE_DEVICES"


def set_expandable_segments(enable: bool) -> None:
    """Switch expandable segments of the device's allocator; engines with a sleep mode need them off.

    torch resets every setting that a call does not name, so this one repeats the user's settings: the ones of the
    environment, and the ones in force.

    ``MEGATRON_CI_DISABLE_EXPANDABLE_SEGMENTS=1`` in the environment keeps them off. If the allocator of torch_npu
    cannot change at run time, ``PYTORCH_NPU_ALLOC_CONF`` decides.
    """
    if get_device_name() == "cpu" or (enable and envs.flag("MEGATRON_CI_DISABLE_EXPANDABLE_SEGMENTS")):
        return
    if get_device_name() == "cuda":
        of_user = envs.read("PYTORCH_ALLOC_CONF") or envs.read("PYTORCH_CUDA_ALLOC_CONF")
        texts = [of_user, torch._C._accelerator_getAllocatorSettings()]
        configure: Callable[[str], None] | None = torch._C._accelerator_setAllocatorSettings
    else:
        texts = [envs.read("PYTORCH_NPU_ALLOC_CONF")]
        configure = getattr(get_torch_device().memory, "_set_allocator_settings", None)
    settings = {name: value for text in texts for name, value in _SETTING.findall(text or "")}
    settings["expandable_segments"] = str(enable)
    if configure is not None:
        configure(",".join(f"{name}:{value}" for name, value in settings.items()))


_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^]]*\]|[^,\s]+)")
