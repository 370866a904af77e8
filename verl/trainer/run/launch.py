"""Start and stop of Ray in the launching process, and the message that a failed run ends with."""

import itertools
import logging
import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf

from verl.trainer.run.resume import run_folder
from verl.utils import envs

logger = logging.getLogger(__name__)

RUNTIME_ENV_VARS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}
# Every worker process has one core. vLLM makes torch.set_num_threads a no-op: the variable has to be there before.
CPU_ENV_VARS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # There vLLM warns of twenty things that are meant so (eager mode, no Triton, no tokenizer).
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Processes that Ray starts before they are asked for lack the environment of a worker, and none could be used.
LOCAL_SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
ERROR_LOG = "error.log"
_TRACE_STARTS = ("--- in the worker", "\t", "Traceback", "ray::", "\x1b[36mray::", "  File ")
_LOG_GRACE_S = 0.5  # what the actors have just printed is still on its way to this terminal


# ---- Ray


def start_ray(config: Any) -> bool:
    """Start or join Ray unless this process already has; returns whether it did.

    A cluster of its own is started on this machine unless ``ray_kwargs.ray_init.address`` or ``RAY_ADDRESS`` names one.
    """
    if ray.is_initialized():
        return False
    options = OmegaConf.to_container(config.ray_kwargs.get("ray_init") or OmegaConf.create({}), resolve=True)
    assert isinstance(options, dict)
    options["runtime_env"] = runtime_env(config, options.get("runtime_env") or {})
    if not options.get("address"):
        options["address"] = None if envs.read("RAY_ADDRESS") else "local"
    if options["address"] == "local":
        give_token_without_home()
        options.setdefault("include_dashboard", False)
        options["_system_config"] = LOCAL_SYSTEM_CONFIG | dict(options.get("_system_config") or {})
        # A cluster of one run on one machine: that it asks for a token is as it should be.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    else:
        for name in ("num_cpus", "num_gpus"):  # belong to whoever started the cluster
            if options.get(name) is None:
                options.pop(name, None)
    options.setdefault("logging_level", "WARNING")
    ray.init(**options)
    return True


def give_token_without_home() -> None:
    """Give the cluster of this run its token by the environment where Ray cannot keep one in the home folder."""
    folder = Path.home() / ".ray"
    if envs.read("RAY_AUTH_TOKEN") or envs.read("RAY_AUTH_TOKEN_PATH") or (folder / "auth_token").exists():
        return
    if not os.access(folder if folder.exists() else Path.home(), os.W_OK):
        envs.write({"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def runtime_env(config: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of all Ray processes: our defaults, below this process's own, below what was chosen."""
    defaults = RUNTIME_ENV_VARS | (CPU_ENV_VARS if config.trainer.device == "cpu" else {})
    env_vars = {name: value for name, value in defaults.items() if envs.read(name) is None}
    merged = chosen | {"env_vars": env_vars | dict(chosen.get("env_vars") or {})}
    if not envs.read("RAY_JOB_CONFIG_JSON_ENV_VAR"):  # set by `ray job submit`, which supplies a working directory
        merged.setdefault("working_dir", None)
    return merged


_terminated = threading.Event()


def catch_sigterm() -> None:
    """Raise KeyboardInterrupt at SIGTERM too from now on; only the main thread can have this."""
    _terminated.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: Any) -> None:
    _terminated.set()  # Ray turns whatever is raised here into a KeyboardInterrupt
    raise KeyboardInterrupt


def interruption() -> tuple[str, int]:
    """Return message and exit code of a run that a signal has ended."""
    return ("terminated", 143) if _terminated.is_set() else ("interrupted", 130)


def stop_ray(owned: bool) -> None:
    """Leave Ray where it was started here; a cluster of this machine alone ends with all its processes."""
    if not owned or not ray.is_initialized():
        return
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}  # once is enough
    time.sleep(_LOG_GRACE_S)
    ray.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- failures


def report_failure(error: BaseException, config: Any) -> str:
    """Write the whole trace to ``error.log`` of the run and return a short message with the cause."""
    root = root_cause(error)
    notes = [note for note in getattr(root, "__notes__", []) if "\n" not in note]  # longer ones are stack traces
    lines = [f"Error: {describe(root)}", *notes]
    path = run_folder(config) / ERROR_LOG
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        lines.append(f"The whole trace is in {path}")
    except OSError as failed:
        lines.append(
            f"The trace could not be written to {path} ({failed}):\n{''.join(traceback.format_exception(error))}"
        )
    return "\n".join(lines)


def root_cause(error: BaseException) -> BaseException:
    """Return the exception that was raised in a Ray process, without what Ray has wrapped it in."""
    for wrapped in _unwrapped(error):
        error = wrapped
    return error


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while isinstance(error, ray.exceptions.RayTaskError) and id(error) not in seen:
        seen.add(id(error))
        cause = getattr(error, "cause", None)
        if not isinstance(cause, BaseException):
            return
        error = cause
        yield error


def describe(error: BaseException) -> str:
    """Return type and message, without the stack traces that messages of other processes hold."""
    text = str(error).strip()
    if isinstance(error, ray.exceptions.RayTaskError):  # its last line names the cause
        return text.splitlines()[-1] if text else type(error).__name__
    kept = list(itertools.takewhile(lambda line: not line.startswith(_TRACE_STARTS), text.splitlines()))
    return f"{type(error).__name__}: {chr(10).join(kept)}"
