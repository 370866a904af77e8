"""Single requests to a SandboxFusion service, as the established verl interface makes them.

Each request goes through ``call_sandbox_api`` of this module, so a test that replaces this function needs no service.
``verl.utils.reward_score.sandbox_fusion`` scores programs.
"""

from contextlib import AbstractContextManager, nullcontext

from verl.utils.json_types import Json
from verl.utils.reward_score import code_tests, sandbox_fusion
from verl.utils.reward_score.code_tests import Metadata, RawTestCases, Result, TestCases
from verl.utils.sandbox import remote
from verl.utils.sandbox.remote import RemoteSandboxError, Reply, run_remotely

DEFAULT_TIMEOUT = 10
MAX_RETRIES = remote.ATTEMPTS
INITIAL_RETRY_DELAY = remote.RETRY_DELAY_S
API_TIMEOUT = remote.MARGIN_S

_FAILED = "API Call Failed: "


def call_sandbox_api(
    sandbox_fusion_url: str,
    code: str,
    stdin: str | None,
    compile_timeout: float,
    run_timeout: float,
    memory_limit_mb: int,
    language: str = "python",
) -> tuple[Reply | None, str | None]:
    """Run a program in the service; return its reply and None, or None and why there is no reply."""
    try:
        reply = run_remotely(
            sandbox_fusion_url, code, stdin, run_timeout, memory_limit_mb, None, compile_timeout, language
        )
    except RemoteSandboxError as error:
        return None, f"{_FAILED}{error}"
    return reply, None


def _process_single_case(
    case_index: int,
    stdin_data: Json,
    expected_output: Json,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int,
    language: str = "python",
    concurrent_semaphore: AbstractContextManager[bool | None] | None = None,
    fn_name: str | None = None,
) -> tuple[Result, Metadata]:
    """Run a program on one input; return the result and details, with ``case_index`` among them."""
    cases = TestCases([stdin_data], [expected_output], fn_name)
    run = _runner(sandbox_fusion_url, timeout, memory_limit_mb, language, concurrent_semaphore)
    result, metadata = sandbox_fusion.check_case(cases, 0, generation, timeout, run)
    return result, _established(metadata, cases, 0) | {"case_index": case_index}


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: RawTestCases,
    generation: str,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int = 1024,
    language: str = "python",
    concurrent_semaphore: AbstractContextManager[bool | None] | None = None,
) -> tuple[list[Result], list[Metadata]]:
    """Run a program on its test cases; return the result and details of each."""
    cases = code_tests.read_test_cases(in_outs)
    run = _runner(sandbox_fusion_url, timeout, memory_limit_mb, language, concurrent_semaphore)
    results, metadata = sandbox_fusion.check_cases(cases, generation, timeout, run)
    return results, [_established(each, cases, index) for index, each in enumerate(metadata)]


def _runner(
    url: str, timeout_s: float, memory_limit_mb: int, language: str, permits: AbstractContextManager[bool | None] | None
) -> sandbox_fusion.Run:
    def run(code: str, stdin: str | None) -> Reply:
        with permits or nullcontext():
            reply, error = call_sandbox_api(url, code, stdin, timeout_s, timeout_s, memory_limit_mb, language)
        if reply is None:
            raise RemoteSandboxError(str(error))
        return reply

    return run


def _established(metadata: Metadata, cases: TestCases, index: int) -> Metadata:
    """Return details by the names of the established verl interface, ``wrong_answer`` for one, and the case's data."""
    of_case = {}
    if index < len(cases.inputs) and index < len(cases.outputs):
        of_case = {"input": cases.inputs[index], "expected_output": cases.outputs[index]}
    error = metadata.get("error")
    return {**of_case, **metadata, "status": metadata["status"].replace(" ", "_"), "api_request_error": error}
