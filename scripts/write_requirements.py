"""Write the ``requirements*.txt`` of the repository from ``pyproject.toml``, for tools that read such files.

python scripts/write_requirements.py          # write them
python scripts/write_requirements.py --check  # exit code 1 if one is out of date

They hold bounds, not versions: the exact set that ran is ``requirements/constraints-cpu.txt``.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

EXTRAS_OF_FILE: dict[str, tuple[str, ...]] = {
    "requirements.txt": (),
    "requirements-cpu.txt": ("cpu", "mcore", "math", "geo", "tools", "langgraph"),
    "requirements-cuda.txt": ("vllm", "gpu"),
    "requirements-npu.txt": (),
    "requirements_sglang.txt": ("sglang",),
    "requirements-test.txt": ("test",),
    "requirements-docs.txt": ("docs",),
}
"""File -> the extras that it adds to the dependencies of verl."""

WITHOUT_VERL = {"requirements-test.txt", "requirements-docs.txt"}
"""Files that hold their extra only: what runs the tests or builds the pages."""

NOTES = {
    "requirements-cpu.txt": "torch: install its CPU build first (docs/install.md).",
    "requirements-cuda.txt": "flash-attn compiles against the torch that vLLM brings: install vLLM first, "
    "then this file with --no-build-isolation.",
    "requirements-npu.txt": "torch_npu and vllm-ascend come with the versions of CANN (docs/ascend.md).",
}


def contents(name: str, project: dict[str, Any]) -> str:
    """Return the text of one file."""
    lines = [] if name in WITHOUT_VERL else list(project["dependencies"])
    for extra in EXTRAS_OF_FILE[name]:
        lines += project["optional-dependencies"][extra]
    head = [f"# Written by scripts/write_requirements.py from pyproject.toml ({described(name)}): do not edit."]
    if name in NOTES:
        head.append(f"# {NOTES[name]}")
    return "\n".join([*head, *sorted(set(lines), key=str.lower)]) + "\n"


def described(name: str) -> str:
    """Return which parts of ``pyproject.toml`` a file holds."""
    parts = [] if name in WITHOUT_VERL else ["dependencies"]
    return ", ".join(parts + [f"extra {extra}" for extra in EXTRAS_OF_FILE[name]])


def outdated(root: Path) -> list[str]:
    """Return the names of the files that differ from what ``pyproject.toml`` says."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        name
        for name in EXTRAS_OF_FILE
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != contents(name, project)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args(arguments)
    names = outdated(ROOT)
    if options.check:
        for name in names:
            print(f"{name} is out of date: run python scripts/write_requirements.py", file=sys.stderr)
        return 1 if names else 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in names:
        (ROOT / name).write_text(contents(name, project), encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
