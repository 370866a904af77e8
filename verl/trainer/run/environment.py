"""Check the environment variables that a run reads, before it starts Ray or torch."""

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from verl.errors import WrongInput
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run.display import check_progress
from verl.trainer.run.refusal import Findings
from verl.utils import envs
from verl.utils.fs import existing_part
from verl.utils.hub import modelscope_problem
from verl.utils.net_utils import rendezvous_ports

_FLAGS = ("VERL_AUTO_PADDING", "VERL_CHECK_PHASES", "VERL_USE_MODELSCOPE")
_SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
_METHODS = ("numpy", "torch")
_PATIENCE_S = 5.0
_POLL_S = 0.5
_HOW_TO_JOIN = "start Ray there (ray start --head), or remove the address to start Ray on this machine"
_MOST_SOCKET_BYTES = 107
"""Length of the longest path that a socket can have."""
_SESSION_BYTES = len("/session_2026-01-01_00-00-00_000000_1000000/sockets/plasma_store")
"""Length of what Ray adds to its folder for the longest of its sockets."""


def check_environment(cluster: RayConfig, trackers: Iterable[str], findings: Findings) -> None:
    """Check the variables that a run on Ray reads, and keep each problem in ``findings``."""
    for name in _FLAGS:
        findings.passes(envs.flag, name)
    for check in (check_hub_variable, check_serialization, check_progress):
        findings.passes(check)
    findings.passes(rendezvous_ports)
    if "file" in trackers:
        findings.passes(check_file_tracker)
    findings.passes(check_ray_folder if cluster.is_local else check_ray_address, cluster)


def check_hub_variable() -> None:
    """Check that the package of ModelScope is installed if a variable asks for it.

    Raises: WrongInput naming the variable.
    """
    if problem := modelscope_problem():
        raise WrongInput(problem)


def check_serialization() -> None:
    """Check the variable that names how batches are sent.

    Raises: WrongInput naming the variable.
    """
    method = envs.read(_SERIALIZATION)
    if method and method.lower() not in _METHODS:
        raise WrongInput(f"environment variable {_SERIALIZATION}={method!r} must be one of {', '.join(_METHODS)}")


def check_file_tracker() -> None:
    """Check that the file tracker can write where variables say.

    Raises: WrongInput naming the variable.
    """
    path = envs.read("VERL_FILE_LOGGER_PATH")
    root = envs.read("VERL_FILE_LOGGER_ROOT")
    if path:
        _check_writable("environment variable VERL_FILE_LOGGER_PATH", path, Path(path).expanduser().parent)
    elif root:
        _check_writable("environment variable VERL_FILE_LOGGER_ROOT", root, Path(root).expanduser())


def check_ray_address(cluster: RayConfig) -> None:
    """Check that something answers at the address of the Ray cluster that the run joins.

    Forms that only Ray understands (``auto``, or the scheme of another client) are left to it.

    Raises: WrongInput naming the key or the variable.
    """
    address = cluster.address
    given = (cluster.ray_init or {}).get("address")
    name = "ray_kwargs.ray_init.address" if given else "environment variable RAY_ADDRESS"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto" or "://" in address.removeprefix("ray://"):
        return
    if not host or not port.isdecimal():
        raise WrongInput(f"{name}={address}: must be HOST:PORT of a Ray cluster, auto, or local")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S).close()
            return
        except ConnectionRefusedError as error:  # the head node may be about to start
            if time.monotonic() > deadline:
                raise WrongInput(f"{name}={address}: {error.strerror}: {_HOW_TO_JOIN}") from error
            time.sleep(_POLL_S)
        except (OSError, OverflowError) as error:
            raise WrongInput(f"{name}={address}: {error}: {_HOW_TO_JOIN}") from error


def private_ray_folder(cluster: RayConfig) -> Path | None:
    """Return the folder of Ray in one that nobody else can enter; None if the user has chosen another.

    Ray makes its own folder open to all.
    """
    if (cluster.ray_init or {}).get("_temp_dir") or envs.read("RAY_TMPDIR") or envs.read("TMPDIR"):
        return None
    return Path(tempfile.gettempdir(), f"verl-{os.getuid()}", "ray")


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or check that it is one.

    Raises: WrongInput for a folder of somebody else, a link or a file.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise WrongInput(
                f"{folder}, where Ray would keep its files, is no folder of this user: remove it, or set RAY_TMPDIR to "
                "a folder of your own"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise WrongInput(
            f"{folder}, where Ray would keep its files: {error.strerror}: set RAY_TMPDIR to a folder of your own"
        ) from error


def check_ray_folder(cluster: RayConfig) -> None:
    """Check that Ray can write to its temporary folder, whose path must leave room for the names of its sockets.

    Raises: WrongInput naming the key or the variable.
    """
    given = (cluster.ray_init or {}).get("_temp_dir")
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if envs.read(name)), None)
    if given:
        name = "ray_kwargs.ray_init._temp_dir"
        chosen = str(given)
        folder = Path(given)
    elif variable:
        chosen = envs.read(variable) or ""
        name = f"environment variable {variable}"
        folder = Path(chosen, "ray")
    else:
        chosen = tempfile.gettempdir()
        name = "the folder for temporary files"
        folder = Path(chosen, f"verl-{os.getuid()}", "ray")
    _check_writable(name, chosen, folder)
    excess = len(os.fsencode(folder.absolute())) + _SESSION_BYTES - _MOST_SOCKET_BYTES
    if excess > 0:
        raise WrongInput(
            f"{name}={chosen}: is {excess} bytes too long: Ray keeps sockets in it, whose paths hold at most "
            f"{_MOST_SOCKET_BYTES} bytes: name a shorter folder, or set RAY_TMPDIR to one"
        )


def check_processes(processes: int, of_node: int, rank: int) -> None:
    """Check the variables with which torchrun numbers the processes of a run.

    Raises: WrongInput naming the variable.
    """
    for name, value in (("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", of_node)):
        if value < 1:
            raise WrongInput(f"environment variable {name}={value} must be 1 or more: torchrun sets it, else unset it")
    if not 0 <= rank < processes:
        raise WrongInput(
            f"environment variable RANK={rank} must be in [0, {processes - 1}], below WORLD_SIZE={processes}: torchrun "
            "sets both, else unset them"
        )


def check_rendezvous(processes: int) -> None:
    """Check that several processes can find each other.

    Raises: WrongInput naming the variables that are missing.
    """
    needed = ("RANK",) if envs.read("DIST_INIT_METHOD") else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if envs.read(name) is None]
    if processes > 1 and missing:
        raise WrongInput(
            f"environment variable WORLD_SIZE={processes} without {', '.join(missing)}: start the run by torchrun, "
            "which sets them, or unset WORLD_SIZE"
        )


def _check_writable(name: str, given: str, folder: Path) -> None:
    existing = existing_part(os.path.abspath(folder))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        raise WrongInput(f"{name}={given}: {existing} is no folder that this run can write to: name another")
