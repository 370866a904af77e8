"""Patch of torch: gloo groups run collectives in one thread, because two threads corrupt the heap of the process.

The bug is in ``c10d::ProcessGroupGloo::runLoop`` of torch 2.13.0 and 2.14.1. After a collective, each thread of a
group assigns the collective's name to one ``std::string`` of the group (``lastCompletedWorkName``) without holding the
lock. Names of more than 15 characters, such as ``ALLGATHER_COALESCED`` of ``DTensor.full_tensor``, live on the heap. If
both threads assign at once, both free the old name, and the process dies later by SIGSEGV or SIGABRT at an unrelated
allocation. ``tests/utils/device/test_gloo.py`` reproduces it. All ranks enqueue a group's collectives in one order,
so a single thread changes nothing else.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from verl.utils import envs


def use_one_thread() -> None:
    """Give one thread to every gloo group that this process creates from now on; idempotent."""
    if not dist.is_gloo_available():
        return
    group_class: Any = dist.ProcessGroupGloo
    make = group_class.__init__
    if getattr(make, "one_thread", False):
        return

    def __init__(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(options, group_class._Options):
            timeout = options if timeout is None else timeout  # torch accepts a timeout as fourth argument
            options = group_class._Options()
            if timeout is not None:
                options._timeout = timeout
            options._devices = _devices(group_class, envs.read("GLOO_SOCKET_IFNAME") or "", os.getpid())
            # torch 2.14 takes enable_reconfigure next to a timeout only; next to options it is a field of them
            for name in [name for name in more if hasattr(options, name)]:
                setattr(options, name, more.pop(name))
        options._threads = 1
        make(self, store, rank, size, options, **more)

    __init__.one_thread = True  # type: ignore[attr-defined]
    group_class.__init__ = __init__


@cache
def _devices(group_class: Any, interfaces: str, process: int) -> list[Any]:
    """Return the network devices of this process, shared by all its groups.

    torch makes a device for each group, and each device has a thread that wakes up a hundred times a second. A worker
    of Megatron-Core has a hundred groups or more: on CPU their idle threads take a good part of a core.

    A forked process lacks the threads of its parent's devices. Therefore it makes new devices, and never frees the
    parent's: freeing a device waits for its thread, which ends the process by SIGSEGV.
    """
    names = [name for name in interfaces.split(",") if name]
    return [group_class.create_device(interface=name) for name in names] or [group_class.create_default_device()]
