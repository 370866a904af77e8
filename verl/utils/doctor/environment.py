"""Read the environment that the checks inspect: packages, variables, memory and devices."""

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypedDict

from packaging.requirements import InvalidRequirement, Requirement

from verl.utils import envs

GIB = 1024**3
IMPORT_TIMEOUT_S = 120

_DEVICE_PROBE = """
import importlib.util, json, sys, torch
cuda = torch.cuda.is_available()
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
npu = {}
if importlib.util.find_spec("torch_npu"):
    try:
        import torch_npu
        here = range(torch.npu.device_count() if torch.npu.is_available() else 0)
        npu = {"version": torch_npu.__version__, "names": [torch.npu.get_device_name(i) for i in here]}
    except Exception as error:
        npu = {"error": f"{type(error).__name__}: {error}"}
sys.stdout.write("\\n" + json.dumps({
    "built_for": "cuda " + torch.version.cuda if torch.version.cuda else "rocm " + torch.version.hip
        if torch.version.hip else "cpu",
    "cuda": cuda, "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "names": [d.name for d in devices], "memory_gb": [d.total_memory / 2**30 for d in devices],
    "capability": [f"{d.major}.{d.minor}" for d in devices], "npu": npu,
}))
"""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to: its purpose, free space, and the error of a write (None if it works)."""

    purpose: str
    path: str
    free_gb: float = 0.0
    error: str | None = None


class Npu(TypedDict, total=False):
    """torch_npu's answer: its version and the names of its devices, or the error of its import."""

    version: str
    names: list[str]
    error: str


class Device(TypedDict, total=False):
    """torch's answer: its build and the devices it sees, or the error of its import."""

    built_for: str
    cuda: bool
    gloo: bool
    names: list[str]
    memory_gb: list[float]
    capability: list[str]
    npu: Npu
    """Empty without torch_npu."""
    error: str


@dataclass
class Environment:
    """A machine and its Python environment."""

    python: tuple[int, int]
    platform: str
    packages: dict[str, str]
    """Distribution -> version."""
    requirements: list[Requirement]
    """This project's requirements, extras by their markers."""
    variables: Mapping[str, str]
    cores: int
    memory_gb: float
    shared_memory_gb: float | None
    free_disk_gb: float
    open_files: int
    driver: str | None
    """The driver version that nvidia-smi reports; None without nvidia-smi."""
    device: Device = field(default_factory=Device)
    folders: tuple[Folder, ...] = ()
    needs: Mapping[str, Sequence[Requirement]] = field(default_factory=dict)
    """Installed distribution -> its requirements."""

    def version(self, package: str) -> str | None:
        """Return the version of an installed distribution."""
        return self.packages.get(normalised(package))

    def import_error(self, code: str) -> str | None:
        """Run code in a subprocess and return the error in one line; None if it succeeds."""
        return run_python(code)[1]


def normalised(name: str) -> str:
    """Return a distribution's name in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def run_python(code: str) -> tuple[str, str | None]:
    """Run code in a subprocess; return its last line of output and, if it fails, the reason in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {IMPORT_TIMEOUT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0:
        return lines[-1] if lines else "", None
    if done.returncode < 0:
        return "", f"signal {-done.returncode} killed the process"
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    raised = [line for line in errors if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return "", (raised or errors or [f"exit code {done.returncode}"])[-1]


def read_environment() -> Environment:
    """Inspect this machine."""
    shared = Path("/dev/shm")
    distributions = [found for found in importlib.metadata.distributions() if found.name]
    return Environment(
        python=sys.version_info[:2],
        platform=f"{platform.system()} {platform.machine()}",
        packages={normalised(found.name): found.version for found in distributions},
        requirements=declared_requirements(),
        variables=envs.mapping(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=_memory() / GIB,
        shared_memory_gb=shutil.disk_usage(shared).total / GIB if shared.exists() else None,
        free_disk_gb=shutil.disk_usage(Path.cwd()).free / GIB,
        folders=tuple(_folder(purpose, path) for purpose, path in _places().items()),
        needs={normalised(found.name): requirements_of(found) for found in distributions},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        driver=_driver(),
        device=_device(),
    )


def requirements_of(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    """Return a distribution's requirements on this platform, without its extras."""
    found = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # an old package with an old syntax
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found


def _memory() -> int:
    """Return the memory available to this process in bytes: the machine's, or its container's limit if lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max" for no limit
            continue
    return min(limits)


def _places() -> dict[str, Path]:
    """Return purpose -> folder for the folders that a run writes to."""
    caches = Path(envs.read("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    temporary = envs.read("RAY_TMPDIR") or envs.read("TMPDIR") or "/tmp"
    return {
        "this folder": Path.cwd(),
        "temporary files": Path(temporary),
        "model cache": Path(envs.read("HF_HOME") or caches / "huggingface"),
        "engine cache": Path(envs.read("VLLM_CACHE_ROOT") or caches / "vllm"),
    }


def _folder(purpose: str, path: Path) -> Folder:
    """Try to write to a folder, or to its nearest existing parent."""
    there = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"verl")
            file.flush()
        return Folder(purpose, str(path), shutil.disk_usage(there).free / GIB)
    except OSError as error:
        return Folder(purpose, str(path), error=error.strerror or str(error))


def declared_requirements() -> list[Requirement]:
    """Return this project's requirements from its checkout, or else from the installed distribution."""
    project = Path(__file__).parents[3] / "pyproject.toml"
    if not project.exists():
        return [Requirement(text) for text in importlib.metadata.requires("verl") or ()]
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    texts = list(declared["dependencies"])
    for extra, more in declared.get("optional-dependencies", {}).items():
        texts += [f"{text} ; extra == '{extra}'" for text in more]
    return [Requirement(text) for text in texts]


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi fails: {error}"
    return (done.stdout.split("\n")[0] if done.returncode == 0 else done.stderr or done.stdout).strip()


def _device() -> Device:
    answer, error = run_python(_DEVICE_PROBE)
    return {"error": error} if error is not None else json.loads(answer)
