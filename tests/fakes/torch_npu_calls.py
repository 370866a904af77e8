"""List the part of torch_npu that verl uses, and find what the installed torch_npu (real or fake) lacks of it.

``python -m tests.fakes.torch_npu_calls`` prints the missing parts as a JSON list.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_ = object()
"""Any argument."""


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call."""
    return args, kwargs


DEVICE: dict[str, list[Any]] = {
    **dict.fromkeys(("is_available", "is_initialized", "device_count", "current_device", "synchronize"), [call()]),
    **dict.fromkeys(("empty_cache", "mem_get_info", "memory_allocated", "memory_reserved"), [call()]),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"), [call()]),
    "get_device_name": [call(), call(_)],
    "set_device": [call(_)],
    "get_rng_state": [call()],
    "set_rng_state": [call(_)],
    # torch itself calls these: to seed all devices, for checkpointed activations, and for the streams of FSDP2
    "get_amp_supported_dtype": [call()],
    "device": [call(_)],
    **dict.fromkeys(("manual_seed", "manual_seed_all", "stream"), [call(_)]),
    "_is_in_bad_fork": [call()],
    "current_stream": [call()],
    "Stream": [call(), call(priority=-1)],
    "Stream.wait_stream": [call(_, _)],
    "Stream.wait_event": [call(_, _)],
    "Stream.record_event": [call(_), call(_, _)],
    "Event": [call()],
    "Event.record": [call(_), call(_, _)],
    "memory": [],
}
"""Name in ``torch.npu`` -> the calls that are made."""

PROFILER: dict[str, list[Any]] = {
    **{f"ProfilerLevel.{name}": [] for name in ("Level_none", "Level0", "Level1", "Level2")},
    **dict.fromkeys(("ProfilerActivity.CPU", "ProfilerActivity.NPU", "ExportType.Db"), []),
    "_ExperimentalConfig": [call(profiler_level=_, export_type=_, data_simplification=True, msprof_tx=True)],
    "tensorboard_trace_handler": [call("folder", analyse_flag=True)],
    "profile": [
        call(
            activities=_, record_shapes=_, profile_memory=_, with_modules=_, with_stack=_, on_trace_ready=_,
            experimental_config=_,
        )
    ],
    **dict.fromkeys(("profile.start", "profile.step", "profile.stop"), [call(_)]),
}  # fmt: skip
"""Likewise of ``torch_npu.profiler``."""

MSTX: dict[str, list[Any]] = {"range_start": [call("message")], "range_end": [call(1)]}
"""Likewise of ``torch_npu.npu.mstx``."""


def missing(where: str, module: ModuleType | type, calls: dict[str, list[Any]]) -> Iterator[str]:
    """Yield each name that a module lacks, and each call that it does not accept."""
    for name, ways in calls.items():
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            yield f"{where}.{name} is missing"
            continue
        for args, kwargs in ways:
            if (problem := _refused(found, args, kwargs)) is not None:
                yield f"{where}.{name}: {problem}"


def _refused(found: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # compiled functions have no signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def all_missing() -> list[str]:
    """Return everything that the installed torch_npu lacks."""
    import torch
    import torch_npu
    from torch_npu.npu import mstx

    found = [*missing("torch.npu", torch.npu, DEVICE), *missing("torch_npu.npu.mstx", mstx, MSTX)]
    found += missing("torch_npu.profiler", torch_npu.profiler, PROFILER)
    if torch._C._get_privateuse1_backend_name() != "npu":
        found.append("torch's private device is not renamed to npu")
    if "hccl" not in torch.distributed.Backend.backend_list:
        found.append("torch.distributed has no backend hccl")
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_missing()))
