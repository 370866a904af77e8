"""Score programs by the share of test cases that they pass in a remote SandboxFusion service."""

import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from verl.utils.reward_score import code_tests
from verl.utils.reward_score.code_tests import Metadata, RawTestCases, Result, TestCases
from verl.utils.sandbox import wrapper
from verl.utils.sandbox.exchange import UNFINISHED
from verl.utils.sandbox.remote import Part, RemoteSandboxError, Reply, run_remotely

Run = Callable[[str, str | None], Reply]
"""(program, standard input) -> reply of the service; raises RemoteSandboxError if there is none."""

_TOO_LONG = "TimeLimitExceeded"
_REFUSALS: dict[float | None, str] = {
    wrapper.REFUSED: "the test cannot be decided apart from the program",
    wrapper.ONE_PROCESS: "the service starts no second process, so that no test code runs apart from the program: "
    "unset reward_model.sandbox_fusion.url to run it on this machine",
}
"""Exit code of the wrapper -> why the case is refused."""


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: AbstractContextManager[bool | None] | None,
    memory_limit_mb: int = 1024,
    completion: str = "",
    test_cases: RawTestCases = None,
    continuous: bool = False,
    timeout: float = 10.0,
) -> tuple[float, list[Metadata]]:
    """Return the score of the program in a response, and the outcome of each case.

    Args:
        concurrent_semaphore: held during each request.
        continuous: score by the share of the first 10 cases that pass; otherwise all cases must pass.
        timeout: seconds to compile, and seconds to run, one case.

    Raises: RemoteSandboxError if every request failed; ValueError for malformed test cases.
    """
    code = code_tests.find_code(completion)
    if code is None:
        return 0.0, [{"status": "no code"}]
    most_tests = code_tests.MOST_TESTS if continuous else None
    results, metadata = check_correctness(
        sandbox_fusion_url, test_cases, code, timeout, memory_limit_mb, concurrent_semaphore, most_tests
    )
    if metadata and all(each["status"] == "api error" for each in metadata):
        raise RemoteSandboxError(metadata[0]["error"])
    return code_tests.score_of(results, continuous), metadata


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: RawTestCases,
    generation: str,
    timeout: float = 10.0,
    memory_limit_mb: int = 1024,
    concurrent_semaphore: AbstractContextManager[bool | None] | None = None,
    most_tests: int | None = None,
) -> tuple[list[Result], list[Metadata]]:
    """Run a program on its test cases and return the result and details of each."""
    cases = code_tests.read_test_cases(in_outs, most_tests)

    def run(code: str, stdin: str | None) -> Reply:
        return run_remotely(sandbox_fusion_url, code, stdin, timeout, memory_limit_mb, concurrent_semaphore)

    return check_cases(cases, generation, timeout, run)


def check_case(cases: TestCases, index: int, code: str, timeout_s: float, run: Run) -> tuple[Result, Metadata]:
    """Run a program on one of its test cases and return the result and details."""
    mark = f"verl-{secrets.token_hex(8)}:"
    try:
        reply = run(*_request(cases, index, code, mark, timeout_s))
    except RemoteSandboxError as error:
        return code_tests.UNKNOWN, {"case_index": index, "status": "api error", "error": str(error)}
    return judge(cases, index, reply, mark)


def check_cases(cases: TestCases, code: str, timeout_s: float, run: Run) -> tuple[list[Result], list[Metadata]]:
    """Run a program on its test cases and return the result and details of each.

    The first case runs alone, so that a program that does not compile is sent only once.
    """
    if (unpaired := cases.unpaired()) is not None:
        return unpaired
    count = len(cases.inputs)
    if not count:
        return [], []

    def check(index: int) -> tuple[Result, Metadata]:
        return check_case(cases, index, code, timeout_s, run)

    judged = [check(0)]
    if count > 1 and judged[0][0] != code_tests.COMPILE_ERROR:
        pool = ThreadPoolExecutor(max_workers=min(count - 1, code_tests.MOST_TESTS))
        try:
            judged += pool.map(check, range(1, count))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupted call does not wait for answers
    results = [result for result, _ in judged]
    metadata = [each for _, each in judged]
    if code_tests.COMPILE_ERROR in results:
        first = results.index(code_tests.COMPILE_ERROR)
        results[first:] = [code_tests.COMPILE_ERROR] * (count - first)
    return results, metadata


def _request(cases: TestCases, index: int, code: str, mark: str, timeout_s: float) -> tuple[str, str | None]:
    """Return the program to send and its standard input; the program puts ``mark`` around a function's result."""
    test = cases.test(index)
    if cases.fn_name is None and not test.code_after:
        return code, test.stdin
    has_test = bool(test.code_after)
    script = wrapper.script(code, cases.fn_name, list(test.arguments), test.stdin, timeout_s, has_test)
    return script, json.dumps([mark, test.code_after])


def judge(cases: TestCases, index: int, reply: Reply, mark: str | None = None) -> tuple[Result, Metadata]:
    """Return the result of a case from the service's reply; without the mark its test did not pass."""
    compilation: Part = reply.get("compile_result") or {}
    execution: Part = reply.get("run_result") or {}
    stdout = execution.get("stdout") or ""
    stderr = execution.get("stderr") or compilation.get("stderr") or ""
    value = None
    if mark is not None and stdout.count(mark) == 2:
        before, value, behind = stdout.split(mark)
        stdout = before + behind
    metadata = {
        "case_index": index,
        "stdout": stdout[: code_tests.SHOWN_CHARS],
        "stderr": stderr[-code_tests.SHOWN_CHARS :],
        "api_status": reply["status"],
        "seconds": execution.get("execution_time"),
    }
    code = execution.get("return_code")
    if compilation.get("status") in ("Error", _TOO_LONG) or code == wrapper.DOES_NOT_COMPILE:
        status = "compile timeout" if compilation.get("status") == _TOO_LONG else "compile error"
        return code_tests.COMPILE_ERROR, metadata | {"status": status}
    if mark is not None and code in _REFUSALS:
        return code_tests.UNKNOWN, metadata | {"status": "refused", "error": stderr or _REFUSALS[code]}
    if execution.get("status") == _TOO_LONG:
        return code_tests.TIMEOUT, metadata | {"status": "timeout"}
    if execution.get("status") == "Error" or code not in (0, None):
        return code_tests.RUNTIME_ERROR, metadata | {"status": "runtime error"}
    if reply["status"] != "Success" or execution.get("status") != "Finished":
        text = str(reply.get("message") or f"status {reply['status']!r}")
        return code_tests.UNKNOWN, metadata | {"status": "sandbox error", "error": text}
    if cases.assertions is not None and value is None:
        metadata["stderr"] = (stderr + UNFINISHED)[-code_tests.SHOWN_CHARS :]
        return code_tests.RUNTIME_ERROR, metadata | {"status": "runtime error"}
    right = code_tests.is_expected(cases, index, stdout, value)
    return right, metadata | {"status": "success" if right else "wrong answer"}
