"""Compare the sandbox's verdicts with plain execution, on right and wrong programs in the shapes of common tasks.

    python -m tests.utils.sandbox.corpus [--every N]

runs all programs (or every N-th), prints a table, and exits with 1 if the verdicts or the refusals miss their bounds.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from tests.utils.sandbox.corpus_tasks import FUNCTIONS, TESTED, Function
from verl.utils.reward_score import prime_code

MIN_EQUAL = 0.99
MAX_REFUSED = 0.02
NEVER_REFUSED = ("MBPP", "HumanEval", "APPS")
Counts = Counter[str]
"""How many programs there are, whose verdicts are equal, and which are refused."""


@dataclass(frozen=True)
class Program:
    """A solution and the cases that decide on it."""

    name: str
    shape: str
    right: bool
    code: str
    cases: dict[str, Any]
    tests: list[str]
    """The same as statements, for plain execution."""


def programs() -> list[Program]:
    """Return the corpus: a right and a wrong program of each task in each shape that it has."""
    found = []
    for task in FUNCTIONS:
        for right in (True, False):
            found += _shapes_of(task, right)
    for number, tested in enumerate(TESTED):
        for right in (True, False):
            code = tested.right if right else tested.wrong
            cases = {"assert_case": tested.tests}
            found.append(Program(f"number {number}", tested.shape, right, code, cases, tested.tests))
    return found


def _shapes_of(task: Function, right: bool) -> list[Program]:
    name = task.name
    function = _function(task, task.right if right else task.wrong)
    signature = task.signature.replace("(", "(self, ", 1)
    method = f"class Solution:\n    def {signature}:\n{_indented(function, 8)}\n        return {task.signature}\n"
    answers = _answers(task)
    calls = [", ".join(map(repr, given)) for given in task.arguments]
    equal = [f"({call}) == {answer!r}" for call, answer in zip(calls, answers, strict=True)]
    equations = [f"assert {name}{each}" for each in equal]
    of_solution = [f"assert Solution().{name}{each}" for each in equal]
    check = "\n".join(f"    assert candidate{each}" for each in equal)
    check = f"METADATA = {{'author': 'verl'}}\n\n\ndef check(candidate):\n{check}\n\ncheck({name})"
    outputs = [json.dumps(answer, default=sorted) for answer in answers]
    as_text = {"inputs": ["\n".join(map(json.dumps, given)) for given in task.arguments], "outputs": outputs}
    as_values = {"inputs": [list(given) for given in task.arguments], "outputs": list(map(json.loads, outputs))}
    return [
        Program(name, "MBPP", right, function, {"assert_case": equations}, equations),
        Program(name, "HumanEval", right, function, {"assert_case": [check]}, [check]),
        Program(name, "APPS", right, function, {"fn_name": name} | as_text, equations),
        Program(name, "LeetCode", right, method, {"fn_name": name} | as_values, of_solution),
        Program(name, "Solution", right, method, {"assert_case": of_solution}, of_solution),
    ]


def _function(task: Function, body: str) -> str:
    return f"def {task.signature}:\n{_indented(body, 4)}\n"


def _indented(code: str, spaces: int) -> str:
    return textwrap.indent(code.strip("\n"), " " * spaces)


def _answers(task: Function) -> list[Any]:
    """Return what the right solution returns."""
    namespace: dict[str, Any] = {}
    exec(_function(task, task.right), namespace)
    return [namespace[task.name](*json.loads(json.dumps(given))) for given in task.arguments]


def plain_verdict(program: Program) -> bool:
    """Return whether a program passes its tests where Python simply runs them; the programs are our own."""
    for test in program.tests:
        namespace: dict[str, Any] = {}
        try:
            exec(program.code, namespace)
            exec(test, namespace)
        except Exception:
            return False
    return True


def sandbox_verdict(program: Program) -> bool | None:
    """Return the sandbox's verdict; None if it refuses the task by name."""
    try:
        results, metadata = prime_code.check_correctness(program.cases, program.code)
    except ValueError:
        return None
    if any("refused" in each["status"] for each in metadata):
        return None
    return all(result is True for result in results)


def compare(chosen: list[Program]) -> tuple[dict[str, Counts], list[str]]:
    """Return the counts by shape, and a line for each verdict that differs from plain execution."""
    rows: dict[str, Counts] = defaultdict(Counter)
    lines = []
    for program in chosen:
        verdict = sandbox_verdict(program)
        expected = plain_verdict(program)
        rows[program.shape].update(programs=1, equal=verdict == expected, refused=verdict is None)
        if verdict != expected:
            said = "refused" if verdict is None else verdict
            lines.append(f"{program.shape}, {program.name}, {'right' if program.right else 'wrong'}: {said}")
    return rows, lines


def bounds_missed(rows: dict[str, Counts]) -> list[str]:
    """Return which bounds the counts miss."""
    total = sum(rows.values(), Counter())
    decided = total["programs"] - total["refused"]
    missed = []
    if total["equal"] < MIN_EQUAL * decided:
        missed.append(f"{total['equal']} of {decided} verdicts are those of plain execution")
    if total["refused"] > MAX_REFUSED * total["programs"]:
        missed.append(f"{total['refused']} of {total['programs']} programs are refused")
    missed += [f"{shape}: {rows[shape]['refused']} refused" for shape in NEVER_REFUSED if rows[shape]["refused"]]
    return missed


def main() -> int:
    """Run the corpus and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="run every N-th program only")
    rows, lines = compare(programs()[:: parser.parse_args().every])
    print(f"{'shape':20} programs  equal  refused")
    for shape, row in [*rows.items(), ("all", sum(rows.values(), Counter()))]:
        print(f"{shape:20} {row['programs']:8} {row['equal']:6} {row['refused']:8}")
    missed = bounds_missed(rows)
    print("\n".join([*lines, *(f"missed: {each}" for each in missed)]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
