"""Resolve the documented GPU installs with pip, without installing, and check the versions that they would bring.

Run it before a release.

    python scripts/resolve_installs.py [--only NAME ...] [--out DIR]

It needs a package index, and downloads metadata for some minutes. It prints a table, and ends with 1 if an install
cannot be resolved, or brings a torch outside the bounds of pyproject.toml or for another CUDA than the image.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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


def resolve(wanted: Sequence[str], report: Path) -> Resolved:
    """Let pip resolve an install into an empty environment.

    Raises: RuntimeError with pip's message if it cannot be resolved.
    """
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*words, "--report", str(report), *wanted], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
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
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"| install | CUDA | {' | '.join(SHOWN)} |\n|{'---|' * (len(SHOWN) + 2)}")
    wrong = []
    for name in given.only:
        try:
            found = resolve(INSTALLS[name], given.out / f"{name.replace('/', ' ')}.json")
        except RuntimeError as error:
            wrong.append(f"{name}: {error}")
            continue
        print(f"| {name} | {found.cuda} | {' | '.join(found.versions.get(each, '') for each in SHOWN)} |", flush=True)
        wrong += [f"{name}: {problem}" for problem in problems(found)]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
