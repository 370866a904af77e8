"""Resolve the documented GPU installs with pip, without installing, and check the versions that they would bring.

Run it before a release.

    python scripts/resolve_installs.py [--only NAME ...] [--out DIR]

It asks PyPI, or the index in PIP_INDEX_URL, for some minutes: the newest pip reads the metadata of wheels without
downloading them. It prints a table, and ends with 1 if an install cannot be resolved, or brings a torch outside the
bounds of pyproject.toml or for another CUDA than the image.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
INSTALLS: dict[str, tuple[str, ...]] = {
    "vLLM": ("-e", ".[vllm]"),
    "vLLM, Megatron-Core": ("-e", ".[vllm,mcore]"),
    "vLLM, docker/Dockerfile.cuda": ("-e", ".[vllm,mcore,math,geo]"),
    "SGLang": ("-e", ".[sglang]"),
    "Liger kernels": ("-e", ".[vllm]", "liger-kernel>=0.8,<0.9"),
}
"""The requirements of each install by its name. flash-attn and Transformer Engine are left out: pip has to compile them
to learn their requirements."""
SHOWN = ("torch", "vllm", "sglang", "transformers", "megatron-core", "ray", "flashinfer-python")


class Resolved(NamedTuple):
    """The versions that an install brings, and the version of CUDA that its torch requires."""

    versions: Mapping[str, str]
    cuda: str | None

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> "Resolved":
        """Read the versions from a report of pip."""
        found = [each["metadata"] for each in report["install"]]
        versions = {canonicalize_name(each["name"]): each["version"] for each in found}
        needs = [text for each in found if each["name"] == "torch" for text in each.get("requires_dist", ())]
        return cls(versions, next(cuda_versions(needs), None))


def cuda_versions(needs: Sequence[str]) -> Iterator[str]:
    """Yield the versions of CUDA among torch's requirements: those of the toolkit or of its runtime."""
    for text in needs:
        requirement = Requirement(text)
        if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu\d+)?", requirement.name):
            yield next(iter(requirement.specifier)).version


def project() -> Mapping[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    found: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def bounds_of(package: str) -> Requirement:
    """Return the project's requirement for a package."""
    return next(each for each in map(Requirement, project()["dependencies"]) if each.name == package)


def image_cuda() -> str:
    """Return the version of CUDA of the docker image in which flash-attn is compiled."""
    found = re.search(r"nvidia/cuda:([\d.]+)-devel", (ROOT / "docker/Dockerfile.cuda").read_text(encoding="utf-8"))
    assert found is not None, "docker/Dockerfile.cuda names no image nvidia/cuda"
    return found[1]


def problems(resolved: Resolved) -> Iterator[str]:
    """Yield the problems of an install."""
    for package in ("torch", "transformers"):
        bounds = bounds_of(package)
        version = resolved.versions.get(package, "0")
        if not bounds.specifier.contains(version):
            yield f"{package} {version} is outside {bounds.specifier} (pyproject.toml)"
    image = image_cuda()
    if resolved.cuda is None or resolved.cuda.split(".")[0] != image.split(".")[0]:
        yield f"torch asks for CUDA {resolved.cuda}, and docker/Dockerfile.cuda has {image}"


def public_index(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which pip uses its index alone.

    A machine may add wheels and constraints of its own, such as a CPU build of torch, which pip would prefer.
    """
    added = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT")
    return {name: value for name, value in environment.items() if name not in added} | {"PIP_CONFIG_FILE": os.devnull}


def copy_metadata(folder: Path) -> None:
    """Copy the files that declare the requirements, since setuptools writes to the folder in which it reads them."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "verl/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def install_pip(folder: Path) -> Path:
    """Install the newest pip into a folder and return its path; a dry run of an old one downloads every wheel."""
    words = ["-m", "pip", "install", "--quiet", "--target", str(folder), "pip"]
    subprocess.run([sys.executable, *words], env=public_index(os.environ), check=True)
    return folder / "pip"


def resolve(wanted: Sequence[str], report: Path, pip: Path) -> Resolved:
    """Let pip resolve an install into an empty environment.

    Raises: RuntimeError with pip's message if it cannot be resolved.
    """
    words = [sys.executable, str(pip), "install", "--dry-run", "--ignore-installed", "--quiet"]
    with TemporaryDirectory() as folder:
        copy_metadata(Path(folder))
        done = subprocess.run(
            [*words, "--use-feature=fast-deps", "--report", str(report), *wanted],
            cwd=folder,
            env=public_index(os.environ),
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError((errors or [done.stderr.strip()])[0])
    return Resolved.read(json.loads(report.read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve the installs, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=INSTALLS, default=[*INSTALLS], help="names of installs")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "installs", help="folder of pip's reports")
    given = parser.parse_args(arguments)
    folder = given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"| install | CUDA | {' | '.join(SHOWN)} |\n|{'---|' * (len(SHOWN) + 2)}")
    wrong = []
    with TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        pip = install_pip(Path(temporary))
        reports = {name: folder / f"{name.replace('/', ' ')}.json" for name in given.only}
        answers = {name: pool.submit(resolve, INSTALLS[name], report, pip) for name, report in reports.items()}
        for name, answer in answers.items():
            try:
                found = answer.result()
            except RuntimeError as error:
                wrong.append(f"{name}: {error}")
                continue
            row = [name, str(found.cuda), *(found.versions.get(each, "") for each in SHOWN)]
            print(f"| {' | '.join(row)} |", flush=True)
            wrong += [f"{name}: {problem}" for problem in problems(found)]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
