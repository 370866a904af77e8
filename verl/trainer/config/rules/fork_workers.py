"""Rules of ``ray_kwargs.fork_workers``: processes of the run are forked from one that has imported their modules."""

import sys
from collections.abc import Iterator, Mapping

from verl.base_config import Violation
from verl.trainer.config.run_config import RunConfig
from verl.utils import envs
from verl.utils.fork_server.starter import has_accelerators
from verl.utils.json_types import Json

KEY = "ray_kwargs.fork_workers"
_HIDES_DEVICES = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""With this variable Ray hides all devices from a process that asks for none, as the trainer."""
_OPTIONS = ("runtime_env", "_system_config", "include_dashboard")


def fork_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield a violation if a run asks for forked workers and something prevents them."""
    if run.ray_kwargs.fork_workers:
        for expected in obstacles(run.trainer.device, run.ray_kwargs.ray_init or {}, run.global_profiler.tool):
            yield Violation(KEY, True, expected)


def obstacles(device: str, ray_init: Mapping[str, Json], profiler: str | None) -> Iterator[str]:
    """Yield each obstacle to forking Ray's processes from the fork server, with a remedy.

    If the key is null, an obstacle makes Ray start these processes itself. A fork must not share the libraries of an
    accelerator, can only run on the machine of the launch, and has the modules that the fork server has imported, even
    if its environment asks for others. With ``cuda`` nothing forks: the fork server itself becomes the trainer.
    """
    if sys.platform != "linux":
        yield f"needs Linux, and this machine runs {sys.platform}: write false or null"
    if device not in ("cpu", "cuda"):
        yield f"needs trainer.device=cpu or cuda, not {device}: write false or null"
    elif device == "cpu" and has_accelerators():  # an engine may look for one while it is imported
        yield "needs a machine without accelerators: write false or null"
    elif device == "cuda":
        if profiler == "nsys":
            yield "needs a trainer that nsys does not start, and global_profiler.tool=nsys: write false or null"
        if envs.read(_HIDES_DEVICES):
            yield f"needs a trainer that sees the devices: unset the environment variable {_HIDES_DEVICES}"
    given = ray_init.get("address")
    address = given or envs.read("RAY_ADDRESS") or "local"
    ray = sys.modules.get("ray")
    if address != "local":
        where = "ray_kwargs.ray_init.address" if given else "environment variable RAY_ADDRESS"
        yield f"needs a Ray that the run starts, and {where}={address} names a cluster: write false or null"
    elif ray is not None and ray.is_initialized():
        yield "needs a Ray that the run starts, and this process has started Ray before: write false or null"
    for name in _OPTIONS:
        if ray_init.get(name):
            yield f"needs the processes as verl starts them: write false or null, or remove ray_kwargs.ray_init.{name}"
