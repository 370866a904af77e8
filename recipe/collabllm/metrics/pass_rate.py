"""Pass rate: the share of the unit tests that the conversation's program passes."""

import ast
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl.interactions.base import Message, text_of
from verl.utils.reward_score.code_tests import find_code
from verl.utils.sandbox import Test, run_tests

MOST_TESTS = 20
TIMEOUT_S = 10.0


async def compute_score(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    num_prompt_messages: int,
    **kwargs: Any,
) -> float:
    """Return the pass rate of the last code block that the assistant wrote; 0 if there is no code block.

    ``extra_info.single_turn_metadata.test`` holds the tests: a list of statements, or a module of ``unittest``.

    Raises: ValueError if the row has no tests.
    """
    tests = tests_of((extra_info.get("single_turn_metadata") or {}).get("test"))
    said = [text_of(message) for message in messages[num_prompt_messages:] if message["role"] == "assistant"]
    code = next((found for text in reversed(said) if "```" in text and (found := find_code(text))), None)
    if code is None:
        return 0.0
    return await asyncio.to_thread(_share, code, tests)


def _share(code: str, tests: Sequence[str]) -> float:
    runs = run_tests(code, [Test(code_after=test) for test in tests], timeout_s=TIMEOUT_S)
    return sum(run.status == "ok" for run in runs) / len(tests)


def tests_of(given: Any) -> list[str]:
    """Return one program per test, which exits without an error if the test passes.

    Raises: ValueError if there are no tests.
    """
    found = [str(each) for each in given] if isinstance(given, Sequence) and not isinstance(given, str) else []
    if isinstance(given, str):
        cases = [
            (case.name, method.name)
            for case in ast.parse(given).body
            if isinstance(case, ast.ClassDef)
            for method in case.body
            if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
        ]
        found = [f"{given}\n\n{_RUN.format(case=case, method=method)}" for case, method in cases] or [given]
    if not found:
        raise ValueError("the row has no tests: write extra_info.single_turn_metadata.test, statements or unittest")
    return found[:MOST_TESTS]


_RUN = """import unittest as _unittest
_result = _unittest.TestResult()
{case}({method!r}).run(_result)
assert _result.wasSuccessful() and not _result.skipped, [*_result.failures, *_result.errors]
"""
