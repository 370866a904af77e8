"""Plant one fault after another in a copy of the code, and print which faults the tests catch.

    python -m scripts.planted_faults --list                # the meaning of each fault, and its tests
    python -m scripts.planted_faults                       # all of them
    python -m scripts.planted_faults gae-counts-tool-tokens k3-reversed
    python -m scripts.planted_faults -n 2 --json after.json --compare before.json

For each fault only the tests that it names run, up to the first failure. The failure counts if the same test passes
without the fault. The exit code is 1 if a fault is not caught. ``--compare`` names the faults that an earlier result
caught and this one does not.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from scripts.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys, pytest, {module}; sys.exit(pytest.main(sys.argv[1:]))"
"""Imports the module with the fault before pytest starts, to tell a failing import from a failing test."""

CAUGHT = "caught"
MISSED = "missed"
NO_IMPORT = "does not import"
FAILS_ANYWAY = "fails without the fault too"
TIMED_OUT = "timed out"
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", flags=re.MULTILINE)
_PASSED = 0
_FAILED = 1
_INTERRUPTED = 2
_NOTHING_RAN = (4, 5)
"""Exit codes of pytest; 2 is an error while it imports test files."""


@dataclass(frozen=True)
class Result:
    """The outcome of a fault's tests, and the first failed test (``by``) with its message (``why``)."""

    outcome: str
    seconds: float
    by: str = ""
    why: str = ""


class FaultError(ValueError):
    """A fault does not match the code: the text to replace or its tests are missing."""


def planted(fault: Fault, root: Path) -> str:
    """Return the content of the fault's file with the fault in it.

    Raises: FaultError if the file does not hold the text to replace exactly once.
    """
    text = (root / fault.file).read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        raise FaultError(
            f"{fault.name}: {fault.file} has the text to replace {count} times: update the fault\n{fault.old}"
        )
    return text.replace(fault.old, fault.new)


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the files of a checkout, untracked files included, but not files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():  # a deleted file is still in the index
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


class Copy:
    """A copy of a checkout, in which faults are planted and tests run."""

    def __init__(self, root: Path, tree: Path) -> None:
        self.root = root
        self.tree = copy_tree(root, tree)
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
        settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
        self._environment = os.environ | settings | {"OMP_NUM_THREADS": "1"}

    def run_tests(self, *arguments: str, module: str = "verl") -> tuple[int, str]:
        """Import a module and run pytest; return the exit code and the output.

        Raises: FaultError if no test ran.
        """
        options = ("-q", "-m", "not full", "--tb=no", "-rfE", "-p", "no:cacheprovider")
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RUN.format(module=module), *options, *arguments],
            cwd=self.tree,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode in _NOTHING_RAN:
            raise FaultError(f"no test ran for {' '.join(arguments)}:\n{done.stdout}")
        return done.returncode, done.stdout

    def try_fault(self, fault: Fault) -> Result:
        """Plant a fault, run its tests, and restore the file."""
        started = time.monotonic()
        module = fault.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        present = [name for name in fault.tests if (self.tree / name).exists()]  # an older checkout lacks some
        (self.tree / fault.file).write_text(planted(fault, self.root), encoding="utf-8")
        try:
            code, output = self.run_tests("-x", *(present or fault.tests), module=module)
        finally:
            shutil.copy2(self.root / fault.file, self.tree / fault.file)
        return result_of(code, output, round(time.monotonic() - started, 1))


def result_of(code: int, output: str, seconds: float) -> Result:
    """Classify a fault by the exit code and the output of pytest."""
    failed = _FAILURE.search(output)
    if code == _PASSED:
        return Result(MISSED, seconds)
    if code == _INTERRUPTED or (code == _FAILED and failed is None):
        return Result(NO_IMPORT, seconds)
    if failed is None:
        return Result(CAUGHT, seconds, f"the test process, which ended with code {code}")
    why = failed[2] or ""
    # A timeout does not show that the fault was caught, since a busy machine also causes it.
    return Result(TIMED_OUT if why.startswith("Failed: Timeout") else CAUGHT, seconds, failed[1], why)


def try_faults(faults: Sequence[Fault], root: Path, processes: int) -> dict[str, Result]:
    """Try faults in one copy per process; then run the failed tests again on a copy without a fault."""
    for fault in faults:
        planted(fault, root)
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(processes):
            copies.put(Copy(root, Path(folder, str(number))))

        def tried(fault: Fault) -> Result:
            copy = copies.get()
            try:
                result = copy.try_fault(fault)
            finally:
                copies.put(copy)
            print(line_of(fault.name, result), flush=True)
            return result

        with ThreadPoolExecutor(processes) as threads:
            results = dict(zip([fault.name for fault in faults], threads.map(tried, faults), strict=True))
        caught = [result.by for result in results.values() if result.outcome == CAUGHT]
        tests = sorted({test for test in caught if "::" in test})
        output = copies.get().run_tests(*tests)[1] if tests else ""
        failing = {test for test, _ in _FAILURE.findall(output)}
    return {
        name: replace(result, outcome=FAILS_ANYWAY) if result.by in failing else result
        for name, result in results.items()
    }


def line_of(name: str, result: Result) -> str:
    """Return the line of the table for a result."""
    return f"{name:<36} {result.outcome:<8} {result.seconds:6.1f} s  {result.by}  {result.why}".rstrip()


def read_results(file: Path) -> dict[str, Result]:
    """Return the results in a file of ``--json``."""
    return {name: Result(**fields) for name, fields in json.loads(file.read_text(encoding="utf-8")).items()}


def lost(before: dict[str, Result], after: dict[str, Result]) -> list[str]:
    """Return the faults that were caught before, and were not caught when tried again."""
    return [
        name
        for name, result in after.items()
        if result.outcome != CAUGHT and name in before and before[name].outcome == CAUGHT
    ]


def chosen(names: Sequence[str]) -> list[Fault]:
    """Return the named faults, by default all.

    Raises: FaultError for a name that no fault has.
    """
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        raise FaultError(f"no fault is called {', '.join(unknown)}: --list shows the names")
    return [known[name] for name in names] or list(FAULTS)


def main(arguments: list[str] | None = None) -> int:
    """Try the faults and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of the faults to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print the faults without trying them")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="checkout of the code and the tests (default: this one)"
    )
    parser.add_argument(
        "-n", type=int, default=1, metavar="N", help="number of faults to try at the same time (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="name the faults that were caught in these results, but not now"
    )
    options = parser.parse_args(arguments)
    faults = chosen(options.names)
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.meaning}\n    {fault.file}; {' '.join(fault.tests)}")
        return 0
    results = try_faults(faults, options.tree.resolve(), options.n)
    rest = {name: result for name, result in results.items() if result.outcome != CAUGHT}
    total = sum(result.seconds for result in results.values())
    print(f"\n{len(results) - len(rest)} of {len(results)} faults are caught, in {total:.0f} s")
    for name, result in rest.items():
        print(line_of(name, result))
    if options.json:
        text = json.dumps({name: asdict(result) for name, result in results.items()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.compare:
        missing = lost(read_results(options.compare), results)
        print("\n".join(f"caught in {options.compare}, and not now: {name}" for name in missing) or "none is lost")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
