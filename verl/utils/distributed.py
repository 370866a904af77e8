"""Start and end of a role's process group, and of processes that were in one."""

import atexit
import datetime
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore  # torch.distributed does not export their types
from torch.distributed.device_mesh import DeviceMesh

from verl.utils import envs
from verl.utils.device import get_device_name, get_process_group_backend, get_torch_device
from verl.utils.device.gloo import use_one_thread
from verl.utils.import_utils import lazy_exports
from verl.utils.net_utils import LOOPBACK

logger = logging.getLogger(__name__)

_FOR_FORKS = ("destroy_global_process_group", "set_numa_affinity")
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.distributed"))

_ENV_KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the process group of torchrun and select this process's device.

    Returns: (local rank, rank, world size).
    """
    use_one_thread()
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_second)
        store = None if envs.flag("TORCHELASTIC_USE_AGENT_STORE") else _store_of_one_machine(timeout)
        rank, size = (-1, -1) if store is None else (envs.integer("RANK", 0), envs.integer("WORLD_SIZE", 1))
        backend = get_process_group_backend()
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    local_rank = envs.integer("LOCAL_RANK", 0)
    if get_device_name() != "cpu":
        get_torch_device().set_device(local_rank)
    return local_rank, dist.get_rank(), dist.get_world_size()


def listening_store(host: str, port: int, size: int, timeout: datetime.timedelta, waits: bool = True) -> TCPStore:
    """Open the store of a group at one address of this machine; torch itself would listen at all addresses.

    Args: ``port`` 0 takes a free one; ``waits`` says whether to wait for the other members.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Without this option the port of an ended run stays occupied for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    port = listener.getsockname()[1]
    # The store takes the socket over and closes it.
    return TCPStore(
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=waits, master_listen_fd=listener.detach()
    )


def _store_of_one_machine(timeout: datetime.timedelta) -> TCPStore | None:
    """Return the store for ranks that all run on this machine; None for ranks on several machines."""
    if envs.read("MASTER_ADDR") != LOOPBACK:
        return None
    port = envs.integer("MASTER_PORT", 0)
    size = envs.integer("WORLD_SIZE", 1)
    if envs.integer("RANK", 0) == 0:
        return listening_store(LOOPBACK, port, size, timeout)
    return TCPStore(LOOPBACK, port, size, is_master=False, timeout=timeout)


def initialize_lone_process_group() -> None:
    """Start a group of this process alone, which needs no address."""
    dist.init_process_group(get_process_group_backend(), store=HashStore(), rank=0, world_size=1)


def initialize_global_process_group_ray(timeout_second: float | None = None) -> None:
    """Join the process group that a worker's environment describes; do nothing if already joined.

    ``timeout_second`` limits the rendezvous and every later collective; None is torch's default.

    Raises: RuntimeError naming the missing variables, or the address, rank and timeout if other ranks do not join.
    """
    use_one_thread()
    if dist.is_initialized():
        return
    init_method = envs.read("DIST_INIT_METHOD")
    needed = _ENV_KEYS[:2] if init_method else _ENV_KEYS
    missing = [name for name in needed if envs.read(name) is None]
    if missing:
        raise RuntimeError(
            f"cannot join a process group: {', '.join(missing)} not set; construct the worker in a worker group"
        )
    rank = envs.integer("RANK", 0)
    world_size = envs.integer("WORLD_SIZE", 1)
    timeout = None if timeout_second is None else datetime.timedelta(seconds=timeout_second)
    try:
        dist.init_process_group(
            backend=get_process_group_backend(),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            init_method=init_method,
            store=None if init_method else _store_of_one_machine(timeout or dist.constants.default_pg_timeout),
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        where = init_method or f"{envs.read('MASTER_ADDR')}:{envs.read('MASTER_PORT')}"
        raise RuntimeError(
            f"rank {rank} of {world_size} could not join the process group at {where} "
            f"(timeout {timeout_second} s): {error}"
        ) from error


def group_timeout(group: dist.ProcessGroup | None = None) -> datetime.timedelta:
    """Return the timeout of a group, by default the group of all ranks.

    torch gives later groups its own default timeout, whatever the timeout of the first group.
    """
    chosen = dist.distributed_c10d._get_default_group() if group is None else group
    device = "cpu" if get_device_name() == "npu" else get_device_name()  # HCCL hides its timeout; gloo has the same
    return chosen._get_backend(torch.device(device)).options._timeout


def take_over_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the timeout of the group of all ranks, which is the configured one."""
    for dim in range(mesh.ndim):
        dist.distributed_c10d._set_pg_timeout(group_timeout(), mesh.get_group(dim))


def leave_process(code: int = 0) -> NoReturn:
    """Exit like the interpreter does, but without finalising it.

    A process that has been in a gloo group must end this way. gloo's threads outlive the group. If one of them asks
    for the interpreter lock during finalisation, Python ends the thread inside C++ code that cannot be unwound, and
    the process aborts (SIGABRT) although its work is done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()  # trackers, log handlers, worker processes, temporary folders
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_and_leave(command: Callable[[], None]) -> NoReturn:
    """Run a command that may join a process group, then leave the process with its exit code.

    Exceptions other than SystemExit end the process as usual, with a traceback and exit code 1.
    """
    try:
        command()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            sys.stderr.write(f"{stop.code}\n")
            leave_process(1)
        leave_process(stop.code or 0)
    leave_process(0)
