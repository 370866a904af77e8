"""Start and stop Ray in the launching process, and write the message of a failed run."""

import itertools
import logging
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import ray
from hydra.core.hydra_config import HydraConfig

from verl.trainer.config.cli import USAGE_ERROR
from verl.trainer.config.run_config import RayConfig
from verl.utils import envs

logger = logging.getLogger(__name__)

T = TypeVar("T")

RUNTIME_ENV_VARS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}
# Every worker process has one core. vLLM disables torch.set_num_threads, so the variable must be set before.
CPU_ENV_VARS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # On a CPU vLLM warns about twenty intended settings (eager mode, no Triton, no tokenizer).
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Prestarted processes lack the environment of a worker, so none could be used.
LOCAL_SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
ERROR_LOG = "error.log"
_TRACE_STARTS = ("--- in the worker", "\t", "Traceback", "ray::", "\x1b[36mray::", "  File ")
_LOG_GRACE_S = 0.5  # time for the last lines of the actors to reach this terminal


# ---- Ray


def checked(check: Callable[[], T]) -> T:
    """Return the result of the checks before the start of Ray.

    Raises: SystemExit with 2 after a short message on standard error if they refuse the input.
    """
    try:
        return check()
    except KeyboardInterrupt:
        _leave(*interruption())
    except Exception as error:  # whatever it is, the person at the terminal gets its cause and not a trace
        _leave(f"error in the configuration: {error}", USAGE_ERROR)


@contextmanager
def ray_session(cluster: RayConfig, device: str, folder: Path) -> Iterator[None]:
    """Run the enclosed code on Ray: start or join it, stop it afterwards, and report a failure.

    Raises: SystemExit after a short message on standard error: with 1 and the whole trace in ``error.log`` of
        ``folder``, or with the code of a signal.
    """
    failure: tuple[str, int] | None = None
    catch_sigterm()
    owns_ray = True  # until start_ray answers: the start itself may be interrupted
    try:
        owns_ray = start_ray(device, cluster)
        catch_sigterm()  # Ray has set another handler
        try:
            yield
        finally:
            if cluster.timeline_json_file:
                ray.timeline(filename=os.path.expanduser(cluster.timeline_json_file))
    except KeyboardInterrupt:
        failure = interruption()
    except Exception as error:  # whatever it is, the person at the terminal gets its cause and not Ray's frames
        failure = report_failure(error, folder), 1
    finally:
        stop_ray(owns_ray)
    if failure is not None:
        _leave(*failure)


def offline_session(cluster: RayConfig, device: str) -> AbstractContextManager[None]:
    """Run a command without a training loop on Ray, as ``ray_session``; its ``error.log`` goes to Hydra's folder."""
    folder = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else os.getcwd()
    return ray_session(cluster, device, Path(folder))


def _leave(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"\n{message}\n")
    sys.exit(code)


def start_ray(device: str, cluster: RayConfig) -> bool:
    """Start or join Ray unless this process already has; return whether it did.

    Starts a cluster on this machine unless the node ``cluster`` or ``RAY_ADDRESS`` has the address of one. ``device``
    is that of the workers.
    """
    if ray.is_initialized():
        return False
    options = dict(cluster.ray_init or {})
    options["runtime_env"] = runtime_env(device, options.get("runtime_env") or {})
    options["address"] = "local" if cluster.is_local else options.get("address") or None
    if cluster.is_local:
        give_token_without_home()
        options.setdefault("include_dashboard", False)
        options["_system_config"] = LOCAL_SYSTEM_CONFIG | dict(options.get("_system_config") or {})
        # Ray warns that the cluster asks for a token, which is intended for one run on one machine.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    else:
        for name in ("num_cpus", "num_gpus"):  # Ray rejects them when it joins a cluster
            if options.get(name) is None:
                options.pop(name, None)
    options.setdefault("logging_level", "WARNING")
    ray.init(**options)
    return True


def give_token_without_home() -> None:
    """Put the token of this run's cluster into the environment if Ray cannot keep it in the home folder."""
    folder = Path.home() / ".ray"
    if envs.read("RAY_AUTH_TOKEN") or envs.read("RAY_AUTH_TOKEN_PATH") or (folder / "auth_token").exists():
        return
    if not os.access(folder if folder.exists() else Path.home(), os.W_OK):
        envs.write({"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def runtime_env(device: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of all Ray processes.

    The ``chosen`` variables override those of this process, which override the defaults.
    """
    defaults = RUNTIME_ENV_VARS | (CPU_ENV_VARS if device == "cpu" else {})
    env_vars = {name: value for name, value in defaults.items() if envs.read(name) is None}
    merged = {**chosen, "env_vars": env_vars | dict(chosen.get("env_vars") or {})}
    if not envs.read("RAY_JOB_CONFIG_JSON_ENV_VAR"):  # set by `ray job submit`, which supplies a working directory
        merged.setdefault("working_dir", None)
    return merged


_terminated = threading.Event()


def catch_sigterm() -> None:
    """Raise KeyboardInterrupt at SIGTERM too; Python allows this in the main thread only."""
    _terminated.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _terminated.set()  # Ray turns any exception of a handler into a KeyboardInterrupt
    raise KeyboardInterrupt


def interruption() -> tuple[str, int]:
    """Return message and exit code of a run that a signal ended."""
    return ("terminated", 143) if _terminated.is_set() else ("interrupted", 130)


def stop_ray(owned: bool) -> None:
    """Leave Ray if this process started it (``owned``); a cluster on this machine ends with all its processes."""
    if not owned or not ray.is_initialized():
        return
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}  # the shutdown must complete
    time.sleep(_LOG_GRACE_S)
    ray.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- failures


def report_failure(error: BaseException, folder: Path) -> str:
    """Write the whole trace to ``error.log`` in the folder of the run and return a short message with the cause."""
    root = root_cause(error)
    notes = [note for note in getattr(root, "__notes__", []) if "\n" not in note]  # longer ones are stack traces
    lines = [f"Error: {describe(root)}", *notes]
    path = folder / ERROR_LOG
    trace = "".join(traceback.format_exception(error))
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
    if isinstance(error, ray.exceptions.RayTaskError):  # its last line names the cause
        return text.splitlines()[-1] if text else type(error).__name__
    kept = list(itertools.takewhile(lambda line: not line.startswith(_TRACE_STARTS), text.splitlines()))
    return f"{type(error).__name__}: {chr(10).join(kept)}"
