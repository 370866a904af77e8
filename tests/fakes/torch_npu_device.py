"""Build the library that gives the fake torch_npu its tensors: ``python -m tests.fakes.torch_npu_device FILE``."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).parent / "torch_npu" / "device.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++")


def build(library: Path) -> None:
    """Compile ``device.cpp`` without loading it; this takes half a minute."""
    assert COMPILER is not None, "a C++ compiler is needed"
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    links = [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    options = ["-shared", "-fPIC", "-std=c++20", "-O0", "-DTORCH_EXTENSION_NAME=npu_device"]
    command = [COMPILER, *options, *includes, str(SOURCE), *links, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
