"""Small helpers for Ray."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl.utils import envs

if TYPE_CHECKING:
    from ray import ObjectRef

_NOSET = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix of the variables, one per kind of device, that tell Ray not to change what its workers see."""


def ray_noset_visible_devices(env_vars: Mapping[str, str] | None = None) -> bool:
    """Whether Ray leaves the visible devices of its workers unchanged; reads this process's environment by default."""
    variables = envs.mapping() if env_vars is None else env_vars
    return any(name.startswith(_NOSET) and value for name, value in variables.items())


@contextmanager
def loopback() -> Iterator[None]:
    """Let ``ray.init`` in the block start a cluster whose processes bind to 127.0.0.1 where they can.

    Ray 2.60 replaces a loopback address by that of the network, except where it supports no cluster of several
    machines; in the block it takes this machine for such a system. This can go when Ray keeps the address given.
    """
    from ray._private import ray_constants

    supports_clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = supports_clusters


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> "list[ObjectRef[Any]]":
    """Put every element into the object store, in several threads, and return the references in order."""
    import ray

    if not data_list:
        return []
    workers = min(len(data_list), max_workers or os.cpu_count() or 1)
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
