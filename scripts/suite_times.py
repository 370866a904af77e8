"""Print the time of the last run of scripts/test.sh by folder, and the share of tests added since a revision.

    python scripts/suite_times.py                         # by folder below tests/
    python scripts/suite_times.py --depth 3 --slowest 20  # by file, with the slowest tests
    python scripts/suite_times.py --since v0.3.0          # how much of it is tests that the revision does not have

With the commit before a change as revision, this is the share of the change. Times are summed over the tests; three
processes run them, so a run takes about a third of the sum.
"""

import argparse
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "outputs" / "suite_times.xml"


@dataclass(frozen=True)
class Timed:
    """A finished test: its file, its name without and with parameters, and its seconds, fixtures included."""

    file: Path
    function: str
    name: str
    seconds: float


def read(report: Path) -> list[Timed]:
    """Read a report in the format of JUnit.

    Raises: FileNotFoundError if no run has written one.
    """
    if not report.exists():
        raise FileNotFoundError(f"{report} does not exist: run scripts/test.sh first, or name another report")
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"@[^\]]*$", "", case.attrib["name"])  # remove the group that pytest-xdist adds
        tests.append(Timed(Path(case.attrib["file"]), name.partition("[")[0], name, float(case.attrib["time"])))
    return tests


def functions_at(revision: str) -> set[str]:
    """Return the test names of a revision, regardless of their files, so that tests in a moved file are not new.

    Raises: ValueError for a revision that git does not know.
    """
    done = subprocess.run(
        ["git", "grep", "-hoE", r"def test_\w+", revision, "--", "tests"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode not in (0, 1):
        raise ValueError(f"--since {revision}: {done.stderr.strip()}")
    return {line.removeprefix("def ") for line in done.stdout.splitlines()}


def lines_of(shares: Counter[str]) -> list[str]:
    """Return a line per share, largest first."""
    total = sum(shares.values()) or 1.0
    return [f"{seconds:9.1f} s {100 * seconds / total:5.1f} %  {name}" for name, seconds in shares.most_common()]


def summary(tests: list[Timed], depth: int, slowest: int, since: list[str]) -> list[str]:
    """Return the lines to print."""
    by_folder: Counter[str] = Counter()
    for test in tests:
        by_folder["/".join(test.file.parts[: depth + 1])] += test.seconds
    lines = lines_of(by_folder) + [f"{sum(by_folder.values()):9.1f} s 100.0 %  {len(tests)} tests"]
    for revision in since:
        known = functions_at(revision)
        added = Counter({f"tests since {revision}": 0.0, "earlier tests": 0.0})
        for test in tests:
            added["earlier tests" if test.function in known else f"tests since {revision}"] += test.seconds
        lines += ["", *lines_of(added)]
    if slowest:
        longest = sorted(tests, key=lambda test: -test.seconds)[:slowest]
        lines += ["", *(f"{test.seconds:9.1f} s  {test.file}::{test.name}" for test in longest)]
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, default=TIMES, help=f"report ({TIMES.relative_to(ROOT)})")
    parser.add_argument(
        "--depth", type=int, default=2, help="depth of the folders to sum up, counted from the root (default: 2)"
    )
    parser.add_argument("--slowest", type=int, default=0, help="number of slowest tests to print (default: 0)")
    parser.add_argument(
        "--since",
        action="append",
        default=[],
        metavar="REV",
        help="print the share of the tests that this revision does not have",
    )
    options = parser.parse_args(arguments)
    print("\n".join(summary(read(options.report), options.depth, options.slowest, options.since)))


if __name__ == "__main__":
    main()
