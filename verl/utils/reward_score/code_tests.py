"""What code is tested by: test cases, the program in a response, and whether its output is the expected one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.sandbox import Test

MOST_TESTS = 10  # of which a share is given
FLOAT_TOLERANCE = 1e-6
WRONG = False
UNKNOWN, RUNTIME_ERROR, TIMEOUT, COMPILE_ERROR = -1, -2, -3, -4
"""Results of a case, beside True and False."""

_PYTHON_BLOCK = re.compile(r"```python\n?(.*?)(?:```|\Z)", re.DOTALL)
_ANY_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)

Result = bool | int
Metadata = dict[str, Any]


@dataclass(frozen=True)
class TestCases:
    """Inputs with the outputs that they are to have; an output that is None is not looked at."""

    __test__ = False

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None
    assertions: list[str] | None = None

    @property
    def are_paired(self) -> bool:
        """Whether every input has an output."""
        return len(self.inputs) == len(self.outputs)

    def first(self, count: int) -> "TestCases":
        """Return the first cases alone."""
        assertions = self.assertions[:count] if self.assertions is not None else None
        return TestCases(self.inputs[:count], self.outputs[:count], self.fn_name, assertions)

    def test(self, index: int) -> Test:
        """Return what the program is given in one case."""
        given = self.inputs[index]
        after = f"\n\n{self.assertions[index]}\n" if self.assertions is not None else ""
        if self.fn_name is None:
            return Test(stdin=_text(given), code_after=after)
        return Test(stdin="", arguments=_arguments(given), code_after=after)


def read_test_cases(test_cases: Any) -> TestCases:
    """Read test cases: JSON, or a dict of ``inputs`` and ``outputs``, and perhaps ``fn_name`` or ``assert_case``.

    Raises: ValueError when it is something else.
    """
    cases = test_cases
    if isinstance(cases, str | bytes):
        try:
            cases = json.loads(cases)
        except ValueError as error:
            raise ValueError(f"the test cases are not JSON: {error}") from None
    if not isinstance(cases, Mapping):
        raise ValueError(f"test cases must be a dict with inputs and outputs, got {type(cases).__name__}")
    assertions = cases.get("assert_case")
    assertions = [assertions] if isinstance(assertions, str) else None if assertions is None else list(assertions)
    inputs = cases.get("inputs", [""] * len(assertions) if assertions is not None else None)
    outputs = cases.get("outputs", [None] * len(assertions) if assertions is not None else None)
    if inputs is None or outputs is None:
        raise ValueError(f"test cases must have inputs and outputs, or assert_case, got {sorted(cases)}")
    return TestCases(list(inputs), list(outputs), cases.get("fn_name"), assertions)


def find_code(completion: str) -> str | None:
    """Return the last Python block of a response, else its first fenced block; None without one."""
    blocks = _PYTHON_BLOCK.findall(completion)
    if blocks:
        return blocks[-1].strip("\n")
    block = _ANY_BLOCK.search(completion)
    return block[2].strip("\n") if block else None


def score_of(results: Sequence[Result], continuous: bool) -> float:
    """Return the share of cases that passed or, not ``continuous``, 1 where all did and 0 otherwise."""
    passed = [result is True for result in results]
    if not passed:
        return 0.0
    return sum(passed) / len(passed) if continuous else float(all(passed))


# ---- output


def is_expected(cases: TestCases, index: int, stdout: str, value: str | None) -> bool:
    """Whether a program said, or its function returned (JSON), what the case expects."""
    expected = cases.outputs[index]
    if expected is None:
        return True
    if cases.fn_name is None:
        return same_output(stdout, _text(expected))
    try:
        actual = json.loads(value or "")
    except (ValueError, RecursionError):  # a program may write anything
        return False
    wanted = [expected]
    if isinstance(expected, str):
        try:
            wanted.append(json.loads(expected))
        except ValueError:
            pass
    wanted += [each[0] for each in wanted if isinstance(each, list) and len(each) == 1]
    return any(same_value(actual, each) for each in wanted)


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs have the same words line by line, numbers with a decimal point up to rounding."""
    lines, expected_lines = (_lines(text) for text in (actual, expected))
    return len(lines) == len(expected_lines) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def same_value(actual: Any, expected: Any) -> bool:
    """Whether two values of JSON are the same, real numbers up to rounding."""
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        return actual == expected or (isinstance(expected, float) and _close(actual, expected))
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[key], expected[key]) for key in actual)
    return actual == expected


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not re.fullmatch(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?", expected):
        return False
    try:
        return _close(float(actual), float(expected))
    except ValueError:
        return False


def _close(actual: float, expected: float) -> bool:
    return abs(actual - expected) <= FLOAT_TOLERANCE * max(1.0, abs(expected))


# ---- input


def _text(value: Any) -> str:
    """Return text as it is, a list of lines as text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a function: a list of them, or text with the JSON of one in every line.

    Raises: ValueError where a line is not JSON.
    """
    if not isinstance(given, str):
        return list(given) if isinstance(given, Sequence) else [given]
    try:
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"an input of a function must have the JSON of one argument per line: {error}") from None
