"""Plant one fault after another in a copy of the code, and print which of them the tests catch.

    python -m scripts.planted_faults --list                # what each fault means, and the tests that should catch it
    python -m scripts.planted_faults                       # all of them: about 50 minutes on one core
    python -m scripts.planted_faults gae-counts-tool-tokens k3-reversed
    python -m scripts.planted_faults -n 2 --json after.json --compare before.json

Only the tests that a fault names run on it, up to the first failure, which counts if the same test passes without the
fault. The exit code is 1 if a fault is not caught, or if one that was caught in the compared result is not caught now.
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

CAUGHT = "caught"
MISSED = "missed"
NO_IMPORT = "does not import"
FAILS_ANYWAY = "fails without the fault too"
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", flags=re.MULTILINE)
_IMPORT_AND_TEST = (
    "import importlib, sys, pytest; importlib.import_module(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
)
_PASSED, _FAILED, _INTERRUPTED, _NOTHING_RAN = 0, 1, 2, (4, 5)
"""Exit codes of pytest; 2 is an error while it imports test files."""


@dataclass(frozen=True)
class Result:
    """What the tests of a fault made of it, and the test that failed first."""

    outcome: str
    seconds: float
    by: str = ""


class FaultError(ValueError):
    """A fault does not fit the code: its text or its tests are gone."""


def planted(fault: Fault, root: Path) -> str:
    """Return the text of the file with the fault.

    Raises: FaultError if the text to replace is not there exactly once.
    """
    text = (root / fault.file).read_text()
    if (count := text.count(fault.old)) != 1:
        raise FaultError(
            f"{fault.name}: {fault.file} has the text to replace {count} times: update the fault\n{fault.old}"
        )
    return text.replace(fault.old, fault.new)


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the files of a checkout, new ones included, without what git ignores."""
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


def run_tests(tree: Path, *arguments: str, module: str = "verl") -> subprocess.CompletedProcess[str]:
    """Import a module in a copy, and run pytest there.

    Raises: FaultError if no test ran.
    """
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
    settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    options = ("-q", "-m", "not full", "--tb=no", "-rfE", "-p", "no:cacheprovider")
    command = [sys.executable, "-c", _IMPORT_AND_TEST, module, *options, *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode in _NOTHING_RAN:
        raise FaultError(f"no test ran for {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done


def try_fault(fault: Fault, root: Path, tree: Path) -> Result:
    """Plant a fault in a copy of ``root``, run its tests, and take it out again."""
    started = time.monotonic()
    (tree / fault.file).write_text(planted(fault, root))
    try:
        module = fault.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        done = run_tests(tree, "-x", *fault.tests, module=module)
    finally:
        shutil.copy2(root / fault.file, tree / fault.file)
    outcome, by = outcome_of(done)
    return Result(outcome, round(time.monotonic() - started, 1), by)


def outcome_of(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return the outcome of the tests, and the one that failed first."""
    failed = _FAILURE.search(done.stdout)
    if done.returncode == _PASSED:
        return MISSED, ""
    if done.returncode == _INTERRUPTED or (done.returncode == _FAILED and failed is None):
        return NO_IMPORT, ""
    return CAUGHT, failed[1] if failed else f"the test process, which ended with code {done.returncode}"


def try_faults(faults: Sequence[Fault], root: Path, processes: int) -> dict[str, Result]:
    """Try faults in as many copies as processes; then run the tests that failed on a copy without a fault."""
    for fault in faults:
        planted(fault, root)
    with tempfile.TemporaryDirectory(prefix="faults") as folder, ThreadPoolExecutor(processes) as threads:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(processes):
            trees.put(copy_tree(root, Path(folder, str(number))))

        def tried(fault: Fault) -> Result:
            tree = trees.get()
            try:
                result = try_fault(fault, root, tree)
            finally:
                trees.put(tree)
            print(line_of(fault.name, result), flush=True)
            return result

        results = dict(zip([fault.name for fault in faults], threads.map(tried, faults), strict=True))
        tests = sorted({result.by for result in results.values() if "::" in result.by})
        failing = set(_FAILURE.findall(run_tests(trees.get(), *tests).stdout)) if tests else set()
    return {
        name: replace(result, outcome=FAILS_ANYWAY) if result.by in failing else result
        for name, result in results.items()
    }


def line_of(name: str, result: Result) -> str:
    """Return a row of the table."""
    return f"{name:<36} {result.outcome:<8} {result.seconds:6.1f} s  {result.by}".rstrip()


def read_results(file: Path) -> dict[str, Result]:
    """Return the results in a file of ``--json``."""
    return {name: Result(**fields) for name, fields in json.loads(file.read_text()).items()}


def lost(before: dict[str, Result], after: dict[str, Result]) -> list[str]:
    """Return the faults that were caught before and were tried again without being caught."""
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
    parser.add_argument("names", nargs="*", help="names of faults (all)")
    parser.add_argument("--list", action="store_true", help="print the faults and try none")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code and tests are tried (this one)")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="faults tried at the same time (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="name what was caught in these results only")
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
        options.json.write_text(text + "\n")
    if options.compare:
        missing = lost(read_results(options.compare), results)
        print("\n".join(f"caught in {options.compare}, and not now: {name}" for name in missing) or "none is lost")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
