"""Score programs by the share of test cases that they pass in the sandbox of this machine."""

from verl.utils.reward_score import code_tests
from verl.utils.reward_score.code_tests import Metadata, RawTestCases, Result
from verl.utils.sandbox import run_tests

_RESULTS: dict[str, Result] = {
    "runtime error": code_tests.RUNTIME_ERROR,
    "output limit": code_tests.RUNTIME_ERROR,
    "refused": code_tests.UNKNOWN,
    "timeout": code_tests.TIMEOUT,
    "compile error": code_tests.COMPILE_ERROR,
}


def compute_score(
    completion: str,
    test_cases: RawTestCases,
    continuous: bool = False,
    timeout: float = 10.0,
    memory_limit_mb: int = 1024,
    allow_unisolated: bool = False,
) -> tuple[float, list[Metadata]]:
    """Return the score of the program in a response, and the outcome of each case.

    Args:
        continuous: score by the share of the first 10 cases that pass; otherwise all cases must pass.
        timeout: seconds of one case.
        allow_unisolated: run the program even if the kernel cannot isolate it.

    Raises: SandboxError if the program cannot be isolated; ValueError for malformed test cases.
    """
    code = code_tests.find_code(completion)
    if code is None:
        return 0.0, [{"status": "no code"}]
    most_tests = code_tests.MOST_TESTS if continuous else None
    results, metadata = check_correctness(
        test_cases, code, timeout, memory_limit_mb, allow_unisolated, most_tests, stop_at_failure=not continuous
    )
    return code_tests.score_of(results, continuous), metadata


def check_correctness(
    in_outs: RawTestCases,
    generation: str,
    timeout: float = 10.0,
    memory_limit_mb: int = 1024,
    allow_unisolated: bool = False,
    most_tests: int | None = None,
    stop_at_failure: bool = False,
) -> tuple[list[Result], list[Metadata]]:
    """Run a program on its test cases and return the result and details of each."""
    cases = code_tests.read_test_cases(in_outs, most_tests)
    if (unpaired := cases.unpaired()) is not None:
        return unpaired
    count = len(cases.inputs)
    tests = [cases.test(i) for i in range(count)]
    runs = run_tests(generation, tests, cases.fn_name, timeout, memory_limit_mb, allow_unisolated, stop_at_failure)
    results: list[Result] = []
    metadata: list[Metadata] = []
    for index, run in enumerate(runs):
        status = run.status
        if status == "ok":
            result: Result = code_tests.is_expected(cases, index, run.stdout, run.value)
            status = "success" if result else "wrong answer"
        else:
            result = _RESULTS[status]
        results.append(result)
        metadata.append(
            {
                "case_index": index,
                "status": status,
                "stdout": run.stdout[: code_tests.SHOWN_CHARS],
                "stderr": run.stderr[-code_tests.SHOWN_CHARS :],
                "seconds": run.seconds,
                "memory_mb": run.memory_mb,
            }
        )
    if len(results) < count:  # the rest did not run: the program does not compile, or a failure stopped it
        does_not_compile = results[-1:] == [code_tests.COMPILE_ERROR]
        missing = code_tests.COMPILE_ERROR if does_not_compile else code_tests.UNKNOWN
        results += [missing] * (count - len(results))
    return results, metadata
