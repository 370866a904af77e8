"""Test cases of code: read them, find the program in a response, and compare its output."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.json_types import Json
from verl.utils.parsing import parse_json
from verl.utils.sandbox import Test

MOST_TESTS = 10
"""Number of cases that a continuous score uses."""
SHOWN_CHARS = 500
"""Length to which the metadata cut the output of a program."""
FLOAT_TOLERANCE = 1e-6
# Results of a case other than True and False
UNKNOWN = -1
RUNTIME_ERROR = -2
TIMEOUT = -3
COMPILE_ERROR = -4

_PYTHON_BLOCK = re.compile(r"```python\n?(.*?)(?:```|\Z)", re.DOTALL)
_ANY_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)

Result = bool | int
Metadata = dict[str, Any]
"""Details of a case: its status, output and resources."""
RawTestCases = str | bytes | Mapping[str, Any] | None
"""Test cases as JSON, or as a mapping of ``inputs`` and ``outputs``."""


@dataclass(frozen=True)
class TestCases:
    """Inputs and expected outputs; an output of None is not compared."""

    __test__ = False

    inputs: list[Json]
    outputs: list[Json]
    fn_name: str | None = None
    assertions: list[str] | None = None

    def unpaired(self) -> "tuple[list[Result], list[Metadata]] | None":
        """Return the results of malformed cases with unequal numbers of inputs and outputs; None if they are equal."""
        count = len(self.inputs)
        if count == len(self.outputs):
            return None
        text = f"{count} inputs and {len(self.outputs)} outputs"
        return [UNKNOWN] * count, [{"status": "error", "error": text}] * count

    def test(self, index: int) -> Test:
        """Return the program's input in one case."""
        given = self.inputs[index]
        after = f"\n\n{self.assertions[index]}\n" if self.assertions is not None else ""
        if self.fn_name is None:
            return Test(stdin=_text(given), code_after=after)
        return Test(stdin="", arguments=_arguments(given), code_after=after)


def read_test_cases(test_cases: RawTestCases, most_tests: int | None = None) -> TestCases:
    """Read test cases: ``inputs`` and ``outputs``, and optionally ``fn_name`` or ``assert_case``; a dict or JSON.

    Args: ``most_tests`` keeps only the first cases.

    Raises: ValueError for anything else.
    """
    cases = test_cases
    if isinstance(cases, str | bytes):
        try:
            cases = parse_json(cases)
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
    assertions = None if assertions is None else assertions[:most_tests]
    return TestCases(list(inputs)[:most_tests], list(outputs)[:most_tests], cases.get("fn_name"), assertions)


def find_code(completion: str) -> str | None:
    """Return the last Python block of a response, else its first fenced block, else None."""
    blocks = _PYTHON_BLOCK.findall(completion)
    if blocks:
        return blocks[-1].strip("\n")
    block = _ANY_BLOCK.search(completion)
    return block[2].strip("\n") if block else None


def score_of(results: Sequence[Result], continuous: bool) -> float:
    """Return the share of cases that passed or, if not ``continuous``, 1 if all passed and else 0."""
    passed = [result is True for result in results]
    if not passed:
        return 0.0
    return sum(passed) / len(passed) if continuous else float(all(passed))


# ---- output


def is_expected(cases: TestCases, index: int, stdout: str, value: str | None) -> bool:
    """Return whether a program's output, or its function's return value (JSON), is the expected one."""
    expected = cases.outputs[index]
    if expected is None:
        return True
    if cases.fn_name is None:
        return same_output(stdout, _text(expected))
    try:
        actual = parse_json(value or "")
    except ValueError:  # the program may have written anything
        return False
    wanted = [expected]
    if isinstance(expected, str):
        try:
            wanted.append(parse_json(expected))
        except ValueError:
            pass
    wanted += [each[0] for each in wanted if isinstance(each, list) and len(each) == 1]
    return any(same_value(actual, each) for each in wanted)


def same_output(actual: str, expected: str) -> bool:
    """Return whether two outputs have the same words line by line, decimal numbers up to rounding."""
    lines, expected_lines = ([line.split() for line in text.strip().splitlines()] for text in (actual, expected))
    return len(lines) == len(expected_lines) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def same_value(actual: Json, expected: Json) -> bool:
    """Return whether two JSON values are equal, real numbers up to rounding."""
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        return (
            actual == expected
            or (isinstance(expected, float) and _close(actual, expected))
            or (
                actual != actual and expected != expected  # both are not a number
            )
        )
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[key], expected[key]) for key in actual)
    return actual == expected


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


def _text(value: Json) -> str:
    """Return text unchanged and join a list of lines."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "\n".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def _arguments(given: Json) -> list[Json]:
    """Return the arguments of a function from a list, or from text with one JSON value per line.

    Raises: ValueError if a line is not JSON.
    """
    if not isinstance(given, str):
        return list(given) if isinstance(given, Sequence) else [given]
    try:
        return [parse_json(line) for line in given.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"a function's input must have one JSON argument per line: {error}") from None
