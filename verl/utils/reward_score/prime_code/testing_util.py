"""Run the test cases of a program in the sandbox of this machine: ``run_test`` of the established verl interface."""

from typing import Any

from verl.utils.reward_score import code_tests
from verl.utils.reward_score.code_tests import RawTestCases, Result
from verl.utils.reward_score.prime_code import check_correctness

_FAILURES = {  # result of ``code_tests`` -> result, error_code and error_message that ``run_test`` returns
    code_tests.COMPILE_ERROR: (-2, -1, "Compilation Error"),
    code_tests.TIMEOUT: (-1, -3, "Time Limit Exceeded"),
    code_tests.RUNTIME_ERROR: (-1, -4, "Runtime Error"),
    code_tests.UNKNOWN: (-1, -4, "Runtime Error"),
}
_WRONG = (False, -2, "Wrong Answer")


def run_test(
    in_outs: RawTestCases, test: str | None = None, debug: bool = False, timeout: float = 15.0
) -> tuple[list[Result], dict[str, Any]]:
    """Run a program on its test cases in order, up to the first that fails.

    Args: ``test`` is the program; ``timeout`` are the seconds of one case; ``debug`` adds the output of the program.

    Returns: the results up to the failure (True, False, -1 for an error at run time, -2 if it does not compile), and
        details of the failure: ``error_code``, ``error_message``, ``error``, ``inputs`` and ``expected``.
    Raises: SandboxError if the program cannot be isolated; ValueError for malformed test cases, or without a program.
    """
    if test is None:
        raise ValueError("run_test needs the program in the argument test, got None")
    cases = code_tests.read_test_cases(in_outs)
    found, metadata = check_correctness(in_outs, test, timeout, stop_at_failure=True)
    failed = next((index for index, result in enumerate(found) if result is not True), None)
    if failed is None:
        return found, {}
    result, code, message = _WRONG if found[failed] is False else _FAILURES[found[failed]]
    details = {"error_code": code, "error_message": message, "error": "", "inputs": None, "expected": None}
    if failed < len(cases.inputs) and failed < len(cases.outputs):
        details |= {"inputs": cases.inputs[failed], "expected": cases.outputs[failed]}
    if failed < len(metadata):
        details["error"] = metadata[failed].get("stderr") or metadata[failed].get("error", "")
        details |= {"output": metadata[failed].get("stdout", "")} if debug or found[failed] is False else {}
    return [*found[:failed], result], details
