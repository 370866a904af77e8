"""Run those commands of the README and the docs that need only a CPU, no download and no files of the reader.

python scripts/run_docs.py             # run them in the order of the pages; the exit code is 1 if one fails
python scripts/run_docs.py --list      # print them
python scripts/run_docs.py --only algo # those whose page or command contains a text
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
    r"bash scripts/(quickstart|setup_env)\.sh"
    r"|(\w+=\S+ )*bash examples/\S+_cpu\S*\.sh( .*)?"
    r"|python -m pytest tests/workers/\S+( .*)?"
    r"|python -m verl\.utils\.doctor"
    r"|python -m verl\.(trainer\.main_ppo|utils\.report|model_merger) .*outputs/quickstart/.*"
    r"|python -m scripts\.engine_attributes"
    r"|python scripts/(check_pr_title|count_structure|rollout_viewer)\.py( .*)?"
    r"|python benchmarks/(algos|dispatch)\.py( --check)?"
    r"|python benchmarks/prefix_sharing\.py --updates 3"
)
"""Commands that run in a fresh clone with the CPU install, given the output of the commands before them.

Benchmarks of more than a few minutes are left out, and so are the tests that continuous integration runs.
"""

READERS_OWN = {
    r"RUN_(DIR|A|B)": "outputs/quickstart/grpo",
    r"checkpoints/project/run/global_step_100": "outputs/quickstart/grpo/global_step_40",
    r"merged": "outputs/quickstart/merged",
}
"""Maps names that pages use for the reader's own files to files that the quick start writes."""

OWN_FILES = re.compile(r"\.\.\.|=tools\.yaml")
"""Matches commands that are abbreviated, or that need a file which the reader writes."""


def commands(page: Path) -> Iterator[str]:
    """Yield the commands in the shell blocks of a page, each on one line and without its comment."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            for name, made in READERS_OWN.items():
                command = re.sub(rf"(?<![\w/]){name}(?!\w)", made, command)
            if command:
                yield command


def runnable(only: str = "") -> list[tuple[Path, str]]:
    """Return the commands to run, each once, with the first page that has it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found: dict[str, Path] = {}
    for page in pages:
        for command in commands(page):
            if RUNS_HERE.fullmatch(command) and not OWN_FILES.search(command):
                found.setdefault(command, page)
    return [(page, command) for command, page in found.items() if only in place(page, command)]


def place(page: Path, command: str) -> str:
    """Return the label of a command in the output: its page and the command."""
    return f"{page.relative_to(ROOT).as_posix()}: {command}"


def run(command: str) -> str:
    """Run a command in the repository with this script's Python; return the error, or an empty text."""
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
    parser.add_argument("--list", action="store_true", help="print the commands without running them")
    parser.add_argument("--only", default="", help="run commands that contain this text, or whose page's path does")
    options = parser.parse_args(arguments)
    failed = 0
    for page, command in runnable(options.only):
        if options.list:
            print(place(page, command))
            continue
        start = time.monotonic()
        problem = run(command)
        failed += bool(problem)
        print(
            f"{'failed' if problem else 'passed'} {time.monotonic() - start:4.0f} s  {place(page, command)}", flush=True
        )
        if problem:
            print(problem, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
