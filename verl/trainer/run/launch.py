"""Start and stop Ray in the launching process, and write the message of a failed run."""

import itertools
import logging
import math
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from hydra.core.hydra_config import HydraConfig

from verl.errors import WrongInput
from verl.trainer.config.problems import MOST_LINES, USAGE_ERROR, brief
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run.display import LocalDisplay
from verl.trainer.run.ending import Ending, EndRequested, Grace, tell_end, written_outputs
from verl.trainer.run.environment import make_private, private_ray_folder
from verl.trainer.run.refusal import checked
from verl.trainer.run.variables import LOOPBACK_ENV_VARS, unset_variables
from verl.trainer.run.watch import Watch, ended_within
from verl.utils import envs
from verl.utils.fork_server.starter import ForkServer
from verl.utils.json_types import Json, mapping_at
from verl.utils.masking import ENVIRONMENT, masked, masked_text
from verl.utils.net_utils import PORT_RANGE
from verl.utils.observe.console import write_line
from verl.utils.process.interrupts import catch_signals, count_of_signals, going_on, ignore_signals
from verl.utils.process.lifetime import descendants, end_all, end_with_this_process, guarded_group
from verl.utils.process.owner import free_folders
from verl.utils.ray_utils import (
    LogForwarder,
    handlers_kept,
    lean_cluster,
    loopback,
    serialize_without_arrow,
    started_in_group,
)

SETUP_HOOK = "verl.utils.process.lifetime.collect_garbage_rarely"
"""The function that each Ray process calls before it imports anything large."""
LOCAL_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,  # prestarted processes lack the environment of a worker
    "free_objects_batch_size": 1,  # free at once: the next batch can use the pages
}
ERROR_LOG = "error.log"
PREVIOUS_ERROR_LOG = "error.previous.log"
_TRACE_STARTS = ("--- in the worker", "\t", "Traceback", "ray::", "\x1b[36mray::", "  File ")
_LOG_GRACE_S = 0.5  # time for the last lines of the actors to reach this terminal
SHUTDOWN_TIMEOUT_S = 15.0
"""Seconds that Ray gets to end its processes; it takes about one."""


# ---- Ray


def run_on_ray(
    cluster: RayConfig,
    device: str,
    folder: Path,
    talk: Callable[[Watch], None],
    display: LocalDisplay,
    timeout_s: float = math.inf,
    serves_metrics: bool = False,
    fork_server: ForkServer | None = None,
    ending: Ending | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Start or join Ray, run ``talk`` in a thread, and leave Ray; report a failure.

    ``timeout_s`` is the timeout of the trainer; see ``Watch``. For ``serves_metrics``, ``fork_server`` and
    ``variables`` see ``start_ray``. A failure is reported before Ray ends, which may take a while. The last line names
    the signal that ended the run; if the run trains, ``ending`` writes this line.

    Raises: SystemExit after a short message on standard error, with the whole trace in ``error.log`` of ``folder``:
        its code is 2 for a wrong input, that of the signal for an interruption, and else 1.
    """
    code = 0
    watch: Watch | None = None
    is_interrupted = False
    has_left = False
    earlier = descendants()
    catch_signals()
    owns_ray = True  # assumed until start_ray returns: the start itself may be interrupted
    grace = Grace() if ending is None else Grace(ending.save_s, ending.has_unsaved_step)

    def write_timeline() -> None:
        if cluster.timeline_json_file:
            ray.timeline(filename=os.path.expanduser(cluster.timeline_json_file))

    try:
        owns_ray = start_ray(device, cluster, serves_metrics, fork_server, variables)
        catch_signals()  # Ray has set a handler that ends this process
        watch = Watch(timeout_s, display.write, grace)
        with going_on(grace.begin):
            watch.run(partial(talk, watch), at_end=write_timeline)
    except KeyboardInterrupt:
        is_interrupted = True
    except Exception as error:  # whatever it is, the person at the terminal gets its cause and not Ray's frames
        root = root_cause(error)
        is_interrupted = grace.has_begun
        # No report for EndRequested: a job scheduler ended the run, and may have signalled Ray's processes as well.
        if not isinstance(root, EndRequested):
            message = report_failure(error, folder)
            code = USAGE_ERROR if isinstance(root, WrongInput) else 1
    else:
        set_error_log_aside(folder)
    grace.close()
    with suppress(KeyboardInterrupt):  # a second Ctrl-C must not skip the message and the end of Ray
        display.close()
        time.sleep(_LOG_GRACE_S if owns_ray and not is_interrupted else 0)
        stop_forwarding()
    if code:
        write_line(f"\n{message}", "stderr")
    is_stuck = watch is not None and watch.is_stuck
    with written_outputs(ending if is_interrupted else None):
        has_left = not owns_ray or stop_ray_anyway(earlier, kill=is_stuck or count_of_signals() > 1)
    if is_interrupted:
        code = tell_end(ending)
    if not has_left:
        free_folders()
        if fork_server is not None:
            fork_server.stop()
        os._exit(code)  # Ray would hang again at the end of the interpreter
    if code:
        sys.exit(code)


def run_offline(cluster: RayConfig, device: str, work: Callable[[], None]) -> None:
    """Run a command without a training loop, like ``run_on_ray``; write its ``error.log`` to Hydra's folder."""
    folder = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else os.getcwd()
    run_on_ray(cluster, device, Path(folder), lambda watch: work(), checked(lambda: LocalDisplay("off")))


_ray_processes: list[psutil.Process] = []
"""The processes of the local cluster as it starts, its agents too: they lose their parent when the raylet dies."""


_log_forwarder: LogForwarder | None = None
"""What shows the lines of the processes of the local cluster, if Ray's own process for this does not run."""


def start_ray(
    device: str,
    cluster: RayConfig,
    serves_metrics: bool = False,
    fork_server: ForkServer | None = None,
    variables: Mapping[str, str] | None = None,
) -> bool:
    """Start or join Ray unless this process already has; return whether it did.

    Starts a cluster on this machine unless the node ``cluster`` or ``RAY_ADDRESS`` has the address of one. ``device``
    is that of the workers. A cluster on this machine has a dashboard only if ``ray_init`` asks for it, and otherwise
    only the processes that a run uses, with Ray's agent if it ``serves_metrics``. Its processes start from the
    ``fork_server``, if there is one. ``variables`` are further defaults for their environment.
    """
    global _log_forwarder
    if ray.is_initialized():
        return False
    options = dict(cluster.ray_init or {})
    on_loopback = cluster.is_local and not options.get("_node_ip_address")
    defaults = dict(variables or {}) | (LOOPBACK_ENV_VARS if on_loopback else {})
    environment = runtime_env(device, options.get("runtime_env") or {}, defaults)
    options["runtime_env"] = environment
    options["address"] = "local" if cluster.is_local else options.get("address") or None
    if cluster.is_local:
        protect_token()
        inherit_secrets(environment["env_vars"])
        options.setdefault("include_dashboard", False)
        folder = private_ray_folder(cluster)
        if folder is not None:
            make_private(folder.parent)
            options["_temp_dir"] = str(folder)
        options["_system_config"] = LOCAL_SYSTEM_CONFIG | dict(options.get("_system_config") or {})
        # Ray warns that the cluster asks for a token, which is intended for one run on one machine.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    else:
        for name in ("num_cpus", "num_gpus"):  # Ray rejects them when it joins a cluster
            if options.get(name) is None:
                options.pop(name, None)
    options.setdefault("logging_level", "WARNING")
    is_lean = cluster.is_local and not options.get("include_dashboard")
    keeps_agent = serves_metrics or options.get("_metrics_export_port") is not None
    worker_command = fork_server.worker_command() if fork_server is not None else None
    lean = lean_cluster(keeps_agent, worker_command) if is_lean else nullcontext()
    with ExitStack() as ways:
        ways.enter_context(handlers_kept())
        if cluster.is_local:
            ways.enter_context(started_in_group(ways.enter_context(guarded_group())))
        ways.enter_context(loopback() if on_loopback else nullcontext())
        ways.enter_context(lean)
        ray.init(**options)
        if cluster.is_local:
            # After the death of the GCS, Ray's agents take a minute to end. This guard ends them at once.
            _ray_processes[:] = psutil.Process().children(recursive=True)
            end_with_this_process(_ray_processes)
    if cluster.is_local:
        serialize_without_arrow()
    if is_lean and options.get("log_to_driver") is not False:
        _log_forwarder = LogForwarder()
    return True


def stop_forwarding() -> None:
    """Stop showing lines of the local cluster's processes."""
    global _log_forwarder
    if _log_forwarder is not None:
        _log_forwarder.stop()
        _log_forwarder = None


def protect_token() -> None:
    """Make the file of the token of local clusters private.

    If Ray cannot keep it in the home folder, this run gets a token through the environment.
    """
    if envs.read("RAY_AUTH_TOKEN") or envs.read("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    new = file.with_name(f"auth_token.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            new.touch(mode=0o600)
            new.write_text(secrets.token_hex(32), encoding="utf-8")
            with suppress(FileExistsError):  # another run was faster
                os.link(new, file)
            new.unlink()
        file.chmod(0o600)
    except OSError:
        if not file.exists():
            envs.write({"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def inherit_secrets(env_vars: dict[str, str]) -> None:
    """Move secret variables of a runtime environment to this process's environment, which a local cluster inherits.

    Ray writes a runtime environment to its logs and to the command lines of processes, which everyone may read.
    """
    shown = masked(env_vars, ENVIRONMENT)
    envs.write({name: env_vars.pop(name) for name in [*env_vars] if shown[name] != env_vars[name]})


def runtime_env(device: str, chosen: Mapping[str, Json], more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the environment of all Ray processes; ``more`` holds further defaults.

    The ``chosen`` variables override those of this process, which override the defaults.
    """
    env_vars = unset_variables(device, more or {})
    if ports := envs.read(PORT_RANGE):  # processes on other nodes get their raylet's environment
        env_vars[PORT_RANGE] = ports
    merged: dict[str, Any] = {"worker_process_setup_hook": SETUP_HOOK, **chosen}
    merged["env_vars"] = env_vars | dict(mapping_at(chosen, "env_vars"))
    if not envs.read("RAY_JOB_CONFIG_JSON_ENV_VAR"):  # set by `ray job submit`, which supplies a working directory
        merged.setdefault("working_dir", None)
    return merged


def stop_ray(earlier: Set[psutil.Process], kill: bool = False) -> bool:
    """Leave Ray, and end its processes if this process started them; return whether this process can exit normally.

    If the start was interrupted, Ray's processes are unknown: they are then all processes that were started since the
    ``earlier`` ones. They are killed with ``kill``, after ``SHUTDOWN_TIMEOUT_S``, or at another Ctrl-C.
    """
    stop_forwarding()
    processes = {*_ray_processes, *(descendants() - earlier)}
    has_left = not ray.is_initialized() or (not kill and ended_within(SHUTDOWN_TIMEOUT_S, ray.shutdown))
    # Other processes end themselves when the raylet ends. An agent takes a minute, so the guard kills it; a start that
    # was interrupted has no guard yet.
    end_all(processes, only_stopped=has_left and bool(_ray_processes))
    return has_left


def stop_ray_anyway(earlier: Set[psutil.Process], kill: bool) -> bool:
    """Stop Ray as ``stop_ray``; at another Ctrl-C kill its processes, and let no further one interrupt that."""
    try:
        return stop_ray(earlier, kill)
    except KeyboardInterrupt:
        ignore_signals()
        stop_ray(earlier, kill=True)
        return False


# ---- failures


def set_error_log_aside(folder: Path) -> None:
    """Rename the ``error.log`` of an earlier run, since the run that has just ended in its folder has not failed."""
    with suppress(OSError):
        (folder / ERROR_LOG).replace(folder / PREVIOUS_ERROR_LOG)


def report_failure(error: BaseException, folder: Path) -> str:
    """Write the whole trace to ``error.log`` in the folder of the run and return a short message with the cause."""
    root = root_cause(error)
    notes = [note for note in getattr(root, "__notes__", []) if "\n" not in note]  # longer ones are stack traces
    lines = [masked_text(brief("\n".join([f"Error: {describe(root)}", *notes]), MOST_LINES - 1))]
    path = folder / ERROR_LOG
    trace = masked_text("".join(traceback.format_exception(error)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace, encoding="utf-8")
        lines.append(f"The whole trace is in {path}")
    except OSError as failed:
        lines.append(f"The trace could not be written to {path} ({failed}):\n{trace}")
    return "\n".join(lines)


def root_cause(error: BaseException) -> BaseException:
    """Return the exception of a Ray process without the exceptions that Ray wraps around it."""
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def describe(error: BaseException) -> str:
    """Return type and message, without the stack traces in messages of other processes."""
    text = str(error).strip()
    if isinstance(error, ray.exceptions.RayTaskError):  # the last line of its message names the cause
        return text.splitlines()[-1] if text else type(error).__name__
    kept = list(itertools.takewhile(lambda line: not line.startswith(_TRACE_STARTS), text.splitlines()))
    return f"{type(error).__name__}: {chr(10).join(kept)}"
