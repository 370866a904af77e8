"""Small helpers for Ray."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from verl.utils import envs
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")
logger = logging.getLogger(__name__)

_NOSET = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix of the variables, one per kind of device, that tell Ray not to change the visible devices of its workers."""


def ray_noset_visible_devices(env_vars: Mapping[str, str] | None = None) -> bool:
    """Whether Ray leaves the visible devices of its workers unchanged; reads this process's environment by default."""
    variables = envs.mapping() if env_vars is None else env_vars
    return any(name.startswith(_NOSET) and value for name, value in variables.items())


def hide_other_devices() -> None:
    """Let this actor and its children see its own accelerators alone, where Ray leaves all of them visible.

    CUDA reads the variable when it starts, so the actor must not have used it.
    """
    import ray

    from verl.utils.device import get_device_name, get_visible_devices_keyword

    device = get_device_name()
    if device == "cpu" or not ray_noset_visible_devices():
        return
    mine = ray.get_runtime_context().get_accelerator_ids().get("NPU" if device == "npu" else "GPU")
    if mine:
        envs.write({get_visible_devices_keyword(): ",".join(sorted(mine, key=lambda name: (len(name), name)))})


@contextmanager
def loopback() -> Iterator[None]:
    """Let ``ray.init`` in the block start a cluster whose processes bind to 127.0.0.1 where they can.

    Ray 2.60 replaces a loopback address by the machine's network address, except on systems where it supports no
    cluster of several machines; in the block Ray takes this machine for such a system. Remove this when Ray keeps the
    given address.
    """
    from ray._private import ray_constants

    supports_clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = supports_clusters


def serialize_without_arrow() -> None:
    """Make Ray serialize without pyarrow in this process, so that it is never imported.

    Ray 2.60 imports pyarrow, if it is installed, when it serializes the first object, to register pyarrow's tables.
    Pickle can serialize tables too, but sends the whole table for a slice. Remove this when Ray waits for a table.
    """
    if "pyarrow" in sys.modules:
        return
    from ray._private import worker

    sys.modules["pyarrow"] = None  # type: ignore[assignment]  # an import fails, and Ray goes on without it
    try:
        worker.global_worker.get_serialization_context()
    finally:
        del sys.modules["pyarrow"]


_AGENT = "--dashboard_agent_command="
_WORKER = "--python_worker_command="
# A shell script in place of the agent. It behaves like Ray's agent without its optional packages: it reports that it
# serves no port, and lives as long as the raylet.
_NO_AGENT = """for name in metrics_agent metrics_export dashboard_agent_listen
do printf %s -1 >"$1/$name$2" && mv "$1/$name$2" "$1/${name}_port_$2"
done
exec cat"""


@contextmanager
def lean_cluster(keep_agent: bool, worker_command: Sequence[str] | None = None) -> Iterator[None]:
    """Let ``ray.init`` in the block start a cluster without the processes that a run on one machine does not use.

    These are the autoscaler, the server of the dashboard (which Ray starts even without the web pages), the log
    monitor, whose work ``LogForwarder`` does in a thread, and, unless ``keep_agent``, the agent that serves metrics and
    the dashboard of this machine. Together they take 240 MB and more than 3 CPU seconds. ``worker_command`` takes the
    place of the interpreter in the command that starts a worker. Without the agent, this process does not import its
    packages either.

    Versions: Ray 2.60, which starts all of them without asking. Remove an entry when ``ray.init`` has an option for it.
    """
    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    unused = ("start_monitor", "start_api_server", "start_log_monitor")
    methods = {name: getattr(Node, name) for name in unused}
    start = services.start_ray_process

    def start_lean(command: Sequence[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [_lean(word, command, keep_agent, worker_command) for word in command]
        return start(list(command), process_type, *args, **kwargs)

    for name in unused:
        setattr(Node, name, lambda self, *args, **kwargs: None)
    services.start_ray_process = start_lean
    find_packages = utils.get_dashboard_dependency_error
    if not keep_agent:
        utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        services.start_ray_process = start
        utils.get_dashboard_dependency_error = find_packages
        for name, method in methods.items():
            setattr(Node, name, method)


def _lean(word: str, command: Sequence[str], keep_agent: bool, worker_command: Sequence[str] | None = None) -> str:
    """Return a word of the command that starts the raylet."""
    if word.startswith(_AGENT) and not keep_agent:
        options = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
        words = ["sh", "-c", _NO_AGENT, "sh", options["--session_dir"], options["--node_id"]]
        return _AGENT + subprocess.list2cmdline(words)
    python = subprocess.list2cmdline([sys.executable])
    if word.startswith(_WORKER + python) and worker_command is not None:
        return _WORKER + subprocess.list2cmdline(worker_command) + word.removeprefix(_WORKER + python)
    return word


@contextmanager
def started_in_group(group: int) -> Iterator[None]:
    """Let ``ray.init`` in the block start its processes in a process group.

    Versions: Ray 2.60. Remove when ``ray.init`` can do that.
    """
    from ray._private import services

    name = "ConsolePopen"
    start = services.ConsolePopen
    setattr(services, name, partial(start, process_group=group))
    try:
        yield
    finally:
        setattr(services, name, start)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep ``ray.init`` in the block from setting a handler of SIGTERM: this process ends Ray itself.

    Versions: Ray 2.60. Remove when ``ray.init`` leaves the handlers of a driver alone.
    """
    from ray._private import utils

    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


class LogForwarder:
    """Shows the lines that the processes of a local cluster write, in a thread of the process that has started Ray."""

    def __init__(self) -> None:
        import ray
        from ray._private.log_monitor import LogMonitor, is_proc_alive

        # The launching process itself reports a dead GCS.
        logging.getLogger("ray._private.log_monitor").setLevel(logging.CRITICAL)
        node: Any = ray._private.worker._global_node
        client = ray._raylet.GcsClient(address=node.gcs_address)  # type: ignore[attr-defined]
        self._monitor = LogMonitor(node.node_ip_address, node.get_logs_dir_path(), client, is_proc_alive)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop before Ray ends; a thread that waits for a stopped GCS is left alone."""
        self._is_over.set()
        self._thread.join(_LOG_STOP_S)

    def _run(self) -> None:
        monitor = self._monitor
        try:
            while not self._is_over.is_set():
                monitor.update_log_filenames()
                monitor.open_closed_files()
                if not monitor.check_log_files_and_publish_updates():
                    self._is_over.wait(_LOG_POLL_S)
        except Exception:  # the run goes on without them
            logger.exception("the lines of the workers are no longer shown; they are in Ray's folder")


_LOG_POLL_S = 0.1
_LOG_STOP_S = 1.0


def parallel_put(data_list: list[T], max_workers: int | None = None) -> "list[ObjectRef[T]]":
    """Put every element into the object store, in several threads, and return the references in order."""
    import ray

    if not data_list:
        return []
    workers = min(len(data_list), max_workers or os.cpu_count() or 1)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(ray.put, data_list))


def without_nsight() -> dict[str, Mapping[str, Json]]:
    """Return options that keep an actor or task from running under nsys; empty if this process does not run under it.

    Ray passes the runtime environment of a process to its children, key by key, and the value None stops that. Ray
    ignores an environment that holds only None, so Ray's default timeout is added.
    """
    import ray

    if not ray.is_initialized() or not ray.get_runtime_context().runtime_env.get("_nsight"):
        return {}
    return {"runtime_env": {"_nsight": None, "config": {"setup_timeout_seconds": 600}}}
