"""Start the fork server in the launching process, and let a local cluster start its workers through it."""

import glob
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

from verl.utils.fork_server import client, server
from verl.utils.process.lifetime import end_with_this_process, start_process
from verl.utils.temporary import FORK, TemporaryFolder

_BACKLOG = 128
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/davinci[0-9]*", "/dev/kfd")


def has_accelerators() -> bool:
    """Whether this machine shows the device file of an accelerator."""
    return any(glob.glob(pattern) for pattern in _ACCELERATORS)


class ForkServer:
    """The fork server, which imports while this process goes on; it ends with this process, or with the cluster.

    Args: ``environment`` holds the variables that all processes share. ``first`` names modules that do not import ray,
        and ``general`` all other modules that every process needs; ``workers`` those that only workers need.
        ``last_of_general`` and ``last_of_workers`` say how many processes of each kind will come, if that is known.
        With ``only_first`` the server never forks: it becomes the first process, unless that is a worker. ``assumed``
        holds variables that Ray sets in that process unless they are set. Modules in ``absent`` are not there while the
        server imports.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        first: Sequence[str],
        general: Sequence[str] = (),
        workers: Sequence[str] = (),
        last_of_general: int | None = None,
        last_of_workers: int | None = None,
        only_first: bool = False,
        assumed: Mapping[str, str] = MappingProxyType({}),
        absent: Sequence[str] = (),
    ) -> None:
        self._folder = TemporaryFolder(FORK)
        end_with_this_process([], [self._folder.path])
        modules = {"first": first, "general": general, "workers": workers}
        listeners = [self._listen(client.GENERAL), *([self._listen(client.WORKERS)] if workers else [])]
        handles = [listener.fileno() for listener in listeners]
        last = {"last_of_general": last_of_general, "last_of_workers": last_of_workers}
        settings = {"parent": os.getpid(), "listeners": handles, "path": sys.path} | modules | last
        settings |= {"only_first": only_first, "assumed": dict(assumed), "absent": absent}
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = [sys.executable, server.__file__, json.dumps(settings)]
        # The server gets its own process group, so that signals to the group of the launching process (Ctrl-C in the
        # terminal, a job scheduler) do not reach its forks.
        self._process = start_process(command, env=dict(environment), pass_fds=handles, process_group=0, **quiet)
        for listener in listeners:
            listener.close()

    def _listen(self, name: str) -> socket.socket:
        """Return a socket that collects requests until the server is ready."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._folder.path / name))
        listener.listen(_BACKLOG)
        return listener

    def worker_command(self) -> list[str]:
        """Return the words that take the place of the interpreter in Ray's command for workers.

        The command has no shell script: files in a temporary folder might not be executable, and a shell drops
        variables with names that it cannot assign to.
        """
        return [sys.executable, "-I", "-S", client.__file__, str(self._folder.path), sys.executable]

    def stop(self) -> None:
        """End the server; its forks go on, unless they have asked the kernel to end with it."""
        self._process.kill()
        self._process.wait()
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
