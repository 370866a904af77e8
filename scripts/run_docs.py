"""Run the commands of the README and the docs that need a CPU only, no download and no files of the reader.

python scripts/run_docs.py             # run them in the order of the pages; the exit code is 1 if one fails
python scripts/run_docs.py --list      # print them
python scripts/run_docs.py --only algo # those of pages whose path contains a text
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200.0
BLOCK = re.compile(r"^```bash\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
RUNS_HERE = re.compile(
    r"bash scripts/quickstart\.sh"
    r"|(\w+=\S+ )*bash examples/\S+_cpu\S*\.sh( .*)?"
    r"|python -m verl\.utils\.doctor"
    r"|python -m verl\.trainer\.main_ppo .*outputs/quickstart/.*"
    r"|python -m scripts\.engine_attributes"
    r"|python scripts/(check_pr_title|count_structure|rollout_viewer)\.py( .*)?"
    r"|python benchmarks/(algos|dispatch)\.py"
)
"""Commands that need nothing which a fresh clone with the CPU set lacks, except for what those before them write."""

OWN_FILES = re.compile(r"\.\.\.|=tools\.yaml")
"""What a command that is not whole has, or one with a file that the reader writes."""


def commands(page: Path) -> Iterator[str]:
    """Yield the commands in the shell blocks of a page, each on one line and without its comment."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command = " ".join(re.sub(r"\s+#.*", "", line).split())
            if command and not command.startswith("#"):
                yield command


def runnable(only: str = "") -> list[tuple[Path, str]]:
    """Return the commands that run here, with their pages; each is run once."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found: dict[str, Path] = {}
    for page in pages:
        for command in commands(page):
            if (
                only in page.relative_to(ROOT).as_posix()
                and RUNS_HERE.fullmatch(command)
                and not OWN_FILES.search(command)
            ):
                found.setdefault(command, page)
    return [(page, command) for command, page in found.items()]


def run(command: str) -> str:
    """Run a command in the repository with the Python of this script; return what went wrong, if anything."""
    script = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; {command}"
    try:
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_S:g} s"
    tail = (done.stdout + done.stderr)[-2000:]
    return f"exit code {done.returncode}:\n{tail}" if done.returncode else ""


def main(arguments: list[str] | None = None) -> int:
    """Run or list the commands and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", default="", help="a part of the path of the pages")
    options = parser.parse_args(arguments)
    failed = 0
    for page, command in runnable(options.only):
        place = f"{page.relative_to(ROOT)}: {command}"
        if options.list:
            print(place)
            continue
        start = time.monotonic()
        problem = run(command)
        failed += bool(problem)
        print(f"{'failed' if problem else 'passed'} {time.monotonic() - start:4.0f} s  {place}", flush=True)
        if problem:
            print(problem, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
