"""Score programs by the share of test cases that they pass in the sandbox of this machine."""

from verl.utils.reward_score.code_tests import (
    COMPILE_ERROR,
    MOST_TESTS,
    RUNTIME_ERROR,
    TIMEOUT,
    UNKNOWN,
    Metadata,
    RawTestCases,
    Result,
    find_code,
    is_expected,
    read_test_cases,
    score_of,
)
from verl.utils.sandbox import Run, run_tests

_RESULTS = {"runtime error": RUNTIME_ERROR, "output limit": RUNTIME_ERROR, "timeout": TIMEOUT}
SHOWN_CHARS = 500


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
    code = find_code(completion)
    if code is None:
        return 0.0, [{"status": "no code"}]
    results, metadata = check_correctness(
        test_cases,
        code,
        timeout=timeout,
        memory_limit_mb=memory_limit_mb,
        allow_unisolated=allow_unisolated,
        most_tests=MOST_TESTS if continuous else None,
        stop_at_failure=not continuous,
    )
    return score_of(results, continuous), metadata


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
    cases = read_test_cases(in_outs, most_tests)
    if (unpaired := cases.unpaired()) is not None:
        return unpaired
    count = len(cases.inputs)
    runs = run_tests(
        generation,
        [cases.test(i) for i in range(count)],
        fn_name=cases.fn_name,
        timeout_s=timeout,
        memory_limit_mb=memory_limit_mb,
        allow_unisolated=allow_unisolated,
        stop_at_failure=stop_at_failure,
    )
    results: list[Result] = []
    metadata = []
    for index, run in enumerate(runs):
        result: Result = COMPILE_ERROR if run.status == "compile error" else _RESULTS.get(run.status, False)
        if run.status == "ok":
            result = is_expected(cases, index, run.stdout, run.value)
        results.append(result)
        metadata.append(_describe(index, run, result))
    if len(results) < count:  # the rest did not run: the program does not compile, or a failure stopped it
        missing = results[-1] if results and results[-1] == COMPILE_ERROR else UNKNOWN
        results += [missing] * (count - len(results))
    return results, metadata


def _describe(index: int, run: Run, result: Result) -> Metadata:
    status = run.status if run.status != "ok" else "success" if result is True else "wrong answer"
    return {
        "case_index": index,
        "status": status,
        "stdout": run.stdout[:SHOWN_CHARS],
        "stderr": run.stderr[-SHOWN_CHARS:],
        "seconds": run.seconds,
        "memory_mb": run.memory_mb,
    }
