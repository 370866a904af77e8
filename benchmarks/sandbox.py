"""Measure what it costs to run test code apart from the program, against both in one interpreter, in turn.

Each row is a program and its test. The sandbox runs them as it does, with the test in a checker, and as it did before:
the test behind the program in one process, with the same isolation, limits and supervisor. One pair follows the other
in random order, so that both meet the same machine. CPU seconds are those of all processes that a run starts.
"""

import argparse
import random
import resource
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.utils.sandbox import Test, run_tests

MIN_THROUGHPUT = 0.7


class Row(NamedTuple):
    """A program and the code of its tests."""

    program: str
    tests: list[str]


RUN_TEST = "\nimport sys\nexec(sys.stdin.read(), globals())\n"
ADD = "def add(a, b):\n    return a + b\n"
SORT = "def order(xs):\n    return sorted(xs)\n"
PRIMES = "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, int(p ** 0.5) + 1))]\n"
STACK = """
class Stack:
    def __init__(self):
        self.items = []

    def push(self, x):
        self.items.append(x)

    def pop(self):
        return self.items.pop()
"""
ROWS = {
    "three assertions": Row(ADD, ["assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'\nassert add([], []) == []"]),
    "ten tests": Row(ADD, [f"assert add({n}, 2) == {n + 2}" for n in range(10)]),
    "100 calls": Row(ADD, ["for n in range(100):\n    assert add(n, 2) == n + 2"]),
    "1000 calls": Row(ADD, ["for n in range(1000):\n    assert add(n, 2) == n + 2"]),
    "100 lists of 100": Row(
        SORT,
        ["cases = [list(range(100, 0, -1)) for _ in range(100)]\nfor xs in cases:\n    assert order(xs) == xs[::-1]"],
    ),
    "a list of 100,000": Row(SORT, ["xs = list(range(100_000, 0, -1))\nassert order(xs) == xs[::-1]"]),
    "a class, 100 calls": Row(
        STACK,
        ["stack = Stack()\nfor n in range(50):\n    stack.push(n)\nassert [stack.pop() for _ in range(50)][0] == 49"],
    ),
    "half a second of work": Row(PRIMES, ["assert len(primes(100_000)) == 9592"]),
}


def cpu_s(row: Row, apart: bool) -> float:
    """Return the CPU seconds of all processes that check a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if apart:
        runs = run_tests(row.program, [Test(code_after=test) for test in row.tests], timeout_s=60.0)
    else:
        runs = run_tests(row.program + RUN_TEST, [Test(stdin=test) for test in row.tests], timeout_s=60.0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(run.status == "ok" for run in runs), runs
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rows: Mapping[str, Row], pairs: int) -> dict[str, dict[bool, list[float]]]:
    """Return the CPU seconds of each row, apart and together."""
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in rows}
    for _ in range(pairs):
        for name, row in rows.items():
            for apart in random.sample([True, False], 2):
                found[name][apart].append(cpu_s(row, apart))
    return found


def main() -> int:
    """Measure and print a table; return 1 if the throughput of a common row is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="measurements of each row")
    parser.add_argument("--only", choices=ROWS, nargs="*", default=list(ROWS), help="measure these rows only")
    options = parser.parse_args()
    found = measure({name: ROWS[name] for name in options.only}, options.pairs)
    print(f"{'median CPU seconds':24} together  apart  throughput")
    for name, times in found.items():
        together, apart = (statistics.median(times[each]) for each in (False, True))
        print(f"{name:24} {together:8.3f} {apart:6.3f} {together / apart:11.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
