"""Small helpers for Ray."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from verl.utils import envs

if TYPE_CHECKING:
    from ray import ObjectRef

# Variables that tell Ray not to change the visible devices of its workers.
_NOSET_VISIBLE_DEVICES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
)


def ray_noset_visible_devices(env_vars: Mapping[str, str] | None = None) -> bool:
    """Whether Ray leaves the visible devices of its workers unchanged; reads this process's environment by default."""
    variables = envs.mapping() if env_vars is None else env_vars
    return any(variables.get(name) for name in _NOSET_VISIBLE_DEVICES)


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> "list[ObjectRef[Any]]":
    """Put every element into the object store, in several threads, and return the references in order.

    Raises: ValueError for an empty list.
    """
    import ray

    if not data_list:
        raise ValueError("parallel_put needs at least one object, got an empty list")
    workers = min(len(data_list), max_workers or os.cpu_count() or 1)
    if workers == 1:
        return [ray.put(item) for item in data_list]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(ray.put, data_list))


def without_nsight() -> dict[str, Any]:
    """Return options that keep an actor or task from running under nsys; empty if this process does not run under it.

    Ray passes the runtime environment of a process to its children, key by key, and the value None stops that. Ray
    ignores an environment that holds only None, so Ray's default timeout is added.
    """
    import ray

    if not ray.is_initialized() or not ray.get_runtime_context().runtime_env.get("_nsight"):
        return {}
    return {"runtime_env": {"_nsight": None, "config": {"setup_timeout_seconds": 600}}}
