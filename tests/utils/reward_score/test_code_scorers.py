"""Code scorers: passed cases, their share, and equal verdicts of the local sandbox and the service."""

import json
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from unittest import mock

import pytest

from verl.errors import SandboxError
from verl.utils.reward_score import (
    code_tests,
    data_source_problem,
    default_compute_score,
    prime_code,
    sandbox_fusion,
)
from verl.utils.reward_score.code_tests import COMPILE_ERROR, RUNTIME_ERROR, TIMEOUT, UNKNOWN
from verl.utils.reward_score.prime_code.testing_util import run_test
from verl.utils.reward_score.sandbox_fusion import utils as service_utils
from verl.utils.sandbox import local, remote
from verl.utils.sandbox.permits import FilePermits
from verl.utils.sandbox.remote import RemoteSandboxError
from verl.workers.rewards.loading import resolve_reward

SUM = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}


def response(code):
    return f"I add them.\n```python\n{code}\n```\nDone."


JUDGE = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
STARTER = "".join(f"from {name} import *\n" for name in [*JUDGE.split(), "builtins", "typing"])
STARTER += f"import {JUDGE.replace(' ', ', ')}\nsys.setrecursionlimit(6 * 10**5)\n"
"""What established judges of LiveCodeBench, APPS and TACO run first, for plain execution."""
FUNCTIONS = {  # body of a method of ``Solution`` with the name ``solve``, its annotated arguments, and values for them
    "return sum(nums)": ("nums: List[int]", [1, 2, 3]),
    "return [k for k, _ in Counter(nums).most_common(1)]": ("nums: Optional[List[int]]", [2, 1, 2]),
    "heap = list(nums); heapify(heap); return heappop(heap)": ("nums", [4, 2, 3]),
    "return bisect_left(nums, 3) + math.comb(4, 2)": ("nums", [1, 3, 5]),
    "return pow(nums[0], 2, 5) + abs(-1)": ("nums", [7]),
    "return list(accumulate(nums)) + [reduce(xor, nums)]": ("nums", [1, 2, 3]),
    "f = cache(lambda n: n if n < 2 else f(n - 1) + f(n - 2)); return f(nums[0])": ("nums", [30]),
    "f = lambda n: 0 if n == 0 else 1 + f(n - 1); return f(nums[0])": ("nums", [20000]),
    "return deepcopy(nums) + [inf > 1, ascii_lowercase[:2]]": ("nums", [[1]]),
    "return datetime.date(2024, 2, nums[0]).day": ("nums", [29]),
    "return undefined(nums)": ("nums", [1]),
    "return Decimal(1)": ("nums", [1]),
}


@pytest.mark.parametrize("form", ["function", "stdin"])
def test_programs_have_the_names_of_their_starter(form):
    for body, (arguments, given) in FUNCTIONS.items():
        code = f"class Solution:\n    def solve(self, {arguments}):\n        {body}\n"
        printing = f"{code}\nprint(json.dumps(Solution().solve(json.loads(stdin.read()))))"
        plain = subprocess.run(
            [sys.executable, "-c", STARTER + printing], input=json.dumps(given), capture_output=True, text=True
        )
        cases = {"inputs": [json.dumps(given)], "outputs": [plain.stdout.strip() or "none"]}
        cases |= {"fn_name": "solve"} if form == "function" else {}
        found, details = prime_code.check_correctness(cases, code if form == "function" else printing)
        assert found == [True if plain.returncode == 0 else RUNTIME_ERROR], (body, plain.stderr, details)


@pytest.mark.parametrize(
    "cases", [{"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, {"assert_case": ["assert gcd(4, 6) == 2"]}]
)
def test_a_name_of_the_starter_is_no_solution(cases):
    for code, passes in (
        ("", False),
        ("x = gcd", False),
        ("gcd = gcd", True),
        ("from math import gcd", True),
        ("def gcd(a, b): return a if b == 0 else gcd(b, a % b)", True),
        ("def gcd(a, b): return 3", False),
    ):
        assert (prime_code.check_correctness(cases, code)[0] == [True]) == passes, code
    if "fn_name" in cases:
        method = "class Solution:\n    def gcd(self, a, b):\n        return gcd(a, b)"
        for before in ("", "assert gcd(2, 4) == 2\n", "from math import *\n"):
            assert prime_code.check_correctness(cases, before + method)[0] == [True], before


@pytest.fixture(params=["local", "service"])
def check(request):
    """The verdicts of a program in both sandboxes."""
    if request.param == "local":
        return prime_code.check_correctness
    return partial(sandbox_fusion.check_correctness, request.getfixturevalue("service").url)


@pytest.mark.parametrize(
    ("code", "cases", "results"),
    [
        (SUM, PAIRS, [True, True, True]),
        ("print(3)", PAIRS, [True, False, False]),
        (SUM + "; import sys; sys.exit(2)", PAIRS, [RUNTIME_ERROR] * 3),
        ("def f(:", PAIRS, [RUNTIME_ERROR] * 3),
        ("n = input()\nwhile n == '3 4': pass\n" + SUM.replace("input()", "n"), PAIRS, [True, TIMEOUT, True]),
        (SUM, {"inputs": ["1 2"], "outputs": ["3", "4"]}, [UNKNOWN]),
        (
            "def add(a, b): return a + b",
            {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]},
            [True, -2],
        ),
        ("exit()", {"assert_case": ["assert add(1, 2) == 3"]}, [RUNTIME_ERROR]),
        (
            "class Solution:\n    def total(self, nums: List[int]) -> int: return sum(nums)",
            {"fn_name": "total", "inputs": [[[1, 2]], [[]]], "outputs": [3, 0]},
            [True, True],
        ),
        (
            "def add(a, b): return a + b\nexit()",
            {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]},
            [True, RUNTIME_ERROR],
        ),
        ("exit(3)", {"assert_case": "assert True"}, [RUNTIME_ERROR]),
    ],
    ids=[
        "right",
        "partly",
        "exit code",
        "syntax",
        "loop",
        "unpaired",
        "assertions",
        "leaves",
        "starter",
        "adds and leaves",
        "fails",
    ],
)
def test_programs(check, code, cases, results):
    if code == "def f(:" and check is prime_code.check_correctness:
        results = [COMPILE_ERROR] * 3  # the service has no compilation step for Python
    got, metadata = check(json.dumps(cases), code, timeout=1)
    assert got == results and all(type(a) is type(b) for a, b in zip(got, results, strict=True))
    assert [each["status"] for each in metadata if each["status"] == "success"] == ["success"] * results.count(True)


F = {"fn_name": "f"}
ADD = {"fn_name": "add", "inputs": ["1\n[2, 3]", "4\n[]"], "outputs": ["[1, 2, 3]", [[4]]]}


@pytest.mark.parametrize(
    ("code", "cases", "results"),
    [
        ("def add(x, xs):\n    print('noise')\n    return (x, *xs)", ADD, [True, True]),
        ("class Solution:\n    def add(self, x, xs):\n        return [x]", ADD, [False, True]),
        ("def add(x): return [x]", ADD, [RUNTIME_ERROR] * 2),
        ("def sub(x, xs): return []", ADD, [RUNTIME_ERROR] * 2),
        ("def add(:", ADD, [COMPILE_ERROR] * 2),
        ("def f(x): return x / 3", F | {"inputs": [[1], [3]], "outputs": [0.33333333, 1]}, [True, True]),
        ("def f(x): return set(x)", F | {"inputs": [[[2, 1]]], "outputs": [[1, 2]]}, [True]),
        ("def f(x): return x == 1", F | {"inputs": ["1", "2"], "outputs": ["true", 0]}, [True, False]),
        ("def f(s): return s", F | {"inputs": ['"1"', '"a"'], "outputs": ["1", "a"]}, [True, True]),
        ("def f(): return 1\nif __name__ == '__main__': 1 / 0", F | {"inputs": [""], "outputs": [1]}, [True]),
    ],
    ids=["function", "method", "arguments", "absent", "syntax", "real", "set", "bool", "text", "main"],
)  # fmt: skip
def test_functions(check, code, cases, results):
    assert check(cases, code, timeout=5)[0] == results


LEAVES_WITH_A_MARK = """import os, sys, __main__
marks = [value for value in vars(__main__).values() if isinstance(value, str) and value.startswith("verl-")]
os.write(1, f"verl-{marks}null".encode())
os._exit(0)"""


@pytest.mark.parametrize(
    "code",
    ["import os; os._exit(0)", "import atexit, os; atexit.register(os._exit, 0)", LEAVES_WITH_A_MARK],
    ids=["at once", "at the end", "with a mark"],
)
@pytest.mark.parametrize("function", [{}, {"fn_name": "add", "inputs": ["1\n2"], "outputs": [None]}])
def test_a_program_that_ends_at_once_has_passed_no_assertion(check, code, function):
    (result,), (said,) = check({"assert_case": ["assert add(1, 2) == 3"]} | function, code, timeout=2)
    assert result == RUNTIME_ERROR and said["status"] == "runtime error"
    assert "ended before the code appended to it" in said["stderr"] or "NameError" in said["stderr"]


@pytest.mark.parametrize(
    "around",
    [
        "import io, sys; sys.stdout = io.StringIO()",
        "import sys; sys.stdout.close()",
        "import os; os.write(1, b'no line')",
        "import atexit; atexit.register(print, 'bye')",
    ],
)
def test_a_program_may_do_what_it_likes_to_its_output(check, around):
    cases = {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}
    assert check(cases, f"{around}\ndef add(a, b): return a + b", timeout=2)[0] == [True, RUNTIME_ERROR]


def test_what_is_put_behind_a_program_does_not_show_in_its_output(check):
    code, cases = "print(input())", {"assert_case": ["assert True"] * 2, "inputs": ["a", "a"], "outputs": ["a", "b"]}
    results, metadata = check(cases, code, timeout=2)
    assert results == [True, False] and [each["stdout"] for each in metadata] == ["a\n", "a\n"]


def test_a_value_that_no_parser_follows_is_wrong():
    code = "import os\ndef f():\n    os.write(3, b'[' * 200000)\n    os._exit(0)"
    assert prime_code.check_correctness(F | {"inputs": [""], "outputs": ["1"]}, code)[0] == [False]


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333333", "0.33333333", True),
        ("1e6", "1000000.0", True),
        ("0.34", "0.33", False),
        ("3.0", "3", False),
        ("nan", "1.0", False),
        ("Yes", "yes", False),
        ("", "", True),
    ],
)
def test_output(actual, expected, same):
    assert code_tests.same_output(actual, expected) is same


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```cpp\na\n```\n```python\nb\n```", "b"),
        ("```py\na\n```\n```\nb\n```", "a"),
        ("```\na\n```", "a"),
        ("```python\nunfinished", "unfinished"),
        ("no code", None),
    ],
)
def test_the_code_of_a_response(completion, code):
    assert code_tests.find_code(completion) == code


def test_share_of_the_first_ten_cases():
    cases = {"inputs": [f"{i} 0" for i in range(12)], "outputs": [str(i if i % 2 else -1) for i in range(12)]}
    assert default_compute_score("apps", response(SUM), json.dumps(cases)) == 0.5
    score, metadata = prime_code.compute_score(response(SUM), cases, continuous=True)
    assert score == 0.5 and [each["case_index"] for each in metadata] == list(range(10))
    assert prime_code.compute_score(response(SUM), cases)[0] == 0.0
    assert prime_code.compute_score(response(SUM), PAIRS)[0] == 1.0
    assert default_compute_score("taco", "no code", json.dumps(cases)) == 0.0
    assert default_compute_score("codeforces", response("def f(:"), cases) == 0.0
    with pytest.raises(ValueError, match="must have inputs and outputs"):
        default_compute_score("codecontests", response(SUM), '{"inputs": []}')
    with pytest.raises(ValueError, match="not JSON"):
        default_compute_score("codecontests", response(SUM), "what")


# ---- the service


def reward_node(**nodes):
    return {"data": {"reward_fn_key": "data_source"}, "reward_model": {"reward_manager": "naive", **nodes}}


def test_the_configuration_reaches_the_service(service):
    node = reward_node(sandbox_fusion={"url": service.url, "max_concurrent": 2, "memory_limit_mb": 256})
    scorer = pickle.loads(pickle.dumps(resolve_reward(node)[1]))
    service.delay_s = 0.05
    cases = {"inputs": [f"{i} 1" for i in range(7)], "outputs": [str(i + 1) for i in range(6)] + ["0"]}
    assert scorer("codecontests", response(SUM), json.dumps(cases)) == pytest.approx(6 / 7)
    assert service.most_at_once == 2 and len(service.requests) == 7
    expected = {"compile_timeout": 10.0, "run_timeout": 10.0, "memory_limit_MB": 256, "language": "python"}
    assert expected | {"files": {}, "fetch_files": [], "code": SUM, "stdin": "0 1"} == service.requests[0]


def test_the_configuration_reaches_the_local_sandbox():
    limits = {"sandbox_fusion": {"url": None, "max_concurrent": 1, "memory_limit_mb": 100}}
    scorer = resolve_reward(reward_node(**limits, local_sandbox={"timeout_s": 1, "allow_unisolated": False}))[1]
    tests = {"inputs": ["", "x"], "outputs": ["200", "0"]}
    code = "if input() if False else not __import__('sys').stdin.read():\n    print(len(bytearray(200 << 20)) >> 20)"
    assert scorer("apps", response(code), tests) == 0.0
    limits["sandbox_fusion"]["memory_limit_mb"] = 1024
    scorer = resolve_reward(reward_node(**limits, local_sandbox={"timeout_s": 1, "allow_unisolated": True}))[1]
    assert scorer("apps", response(code), tests) == 0.5
    assert scorer.keywords["allow_unisolated"] is True and scorer.keywords["sandbox_timeout_s"] == 1


def test_the_service_is_asked_again_when_it_is_busy(service, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_DELAY_S", 0.01)
    service.failures = [504, 504]
    assert sandbox_fusion.compute_score(service.url, None, 256, response(SUM), PAIRS)[0] == 1.0
    service.failures = [504, 504, 504]
    results, metadata = sandbox_fusion.check_correctness(service.url, PAIRS, SUM)
    assert results == [UNKNOWN, True, True] and "HTTP status 504 in attempt 3" in metadata[0]["error"]
    service.failures = [500, 500, 500]
    with pytest.raises(RemoteSandboxError, match="HTTP status 500 in attempt 1"):  # a failure, which is counted
        sandbox_fusion.compute_score(service.url, None, 256, response(SUM), PAIRS, continuous=True)
    with pytest.raises(RemoteSandboxError, match="refused"):
        default_compute_score("apps", response(SUM), PAIRS, sandbox_fusion_url="http://127.0.0.1:9/run_code")


def test_a_service_that_hangs_is_left(service, monkeypatch):
    monkeypatch.setattr(remote, "MARGIN_S", 0.1)
    service.delay_s = 1.0
    results, metadata = sandbox_fusion.check_correctness(service.url, PAIRS, SUM, timeout=0.05)
    assert results == [UNKNOWN] * 3 and "timed out" in metadata[0]["error"]


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ({"status": "Failed", "compile_result": {"status": "Error"}, "run_result": None}, COMPILE_ERROR),
        ({"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}, "run_result": None}, COMPILE_ERROR),
        ({"status": "SandboxError", "message": "full", "compile_result": None, "run_result": None}, UNKNOWN),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "3"}}, True),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4"}}, False),
    ],
)
def test_replies_of_the_service(reply, result):
    assert sandbox_fusion.judge(code_tests.read_test_cases(PAIRS), 0, reply)[0] is result


def test_permits_bound_threads_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    permits, lock, inside, most = FilePermits(str(tmp_path), 3), threading.Lock(), [0], [0]

    def work():
        with permits:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most[0] == 3
    monkeypatch.setattr("verl.utils.sandbox.permits.WAIT_TIMEOUT_S", 0.05)
    one, same = FilePermits(str(tmp_path) + "1", 1), FilePermits(str(tmp_path) + "1", 1)
    with one, pytest.raises(TimeoutError, match="none of the 1 permits"):
        same.__enter__()
    with same:
        pass


# ---- where the kernel cannot keep code apart


def test_code_is_refused_where_it_cannot_be_kept_apart(monkeypatch):
    """Simulate a kernel without Landlock: rules for a missing folder fail the same way."""
    real = local._supervise

    def on_another_kernel(request, timeout_s, files, cancelled=None):
        asked = json.loads(request)
        return real(
            json.dumps(asked | {"folder": "/nowhere"} if asked["isolated"] else asked), timeout_s, files, cancelled
        )

    monkeypatch.setattr(local, "_supervise", on_another_kernel)
    local.isolation_problem.cache_clear()
    try:
        assert "cannot isolate untrusted code" in local.isolation_problem()
        with pytest.raises(SandboxError, match="cannot isolate untrusted code"):
            prime_code.compute_score(response(SUM), PAIRS)
        assert prime_code.compute_score(response(SUM), PAIRS, allow_unisolated=True)[0] == 1.0
        problem = data_source_problem("taco")
        assert "reward_model.sandbox_fusion.url" in problem and "local_sandbox.allow_unisolated=true" in problem
        assert data_source_problem("taco", runs_code_here=False) is None
    finally:
        local.isolation_problem.cache_clear()


FINISHED = {"status": "Success", "run_result": {"status": "Finished", "stdout": "3\n", "stderr": "", "return_code": 0}}


@pytest.mark.parametrize(
    ("reply", "error", "result", "status"),
    [
        (FINISHED, None, True, "success"),
        ({**FINISHED, "run_result": {**FINISHED["run_result"], "stdout": "4"}}, None, False, "wrong_answer"),
        ({"status": "Failed", "run_result": {"status": "Error", "return_code": 1}}, None, -2, "runtime_error"),
        ({"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}, None, -3, "timeout"),
        ({"status": "Failed", "compile_result": {"status": "Error", "stderr": "f("}}, None, -4, "compile_error"),
        (None, "API Call Failed: Gateway Timeout (504)", -1, "api_error"),
    ],
)
def test_the_established_path_of_the_service_takes_a_stand_in(reply, error, result, status):
    calls = []

    def stand_in(*args, **kwargs):
        calls.append(args)
        return reply, error

    with mock.patch("verl.utils.reward_score.sandbox_fusion.utils.call_sandbox_api", stand_in):
        results, metadata = service_utils.check_correctness("http://nowhere", PAIRS | {"outputs": ["3"] * 3}, SUM)
        one = service_utils._process_single_case(7, "1 2\n", "3", "http://nowhere", SUM, 5, 64, "python", None)
    assert results == [result] * 3 and {each["status"] for each in metadata} == {status}
    assert metadata[0]["api_request_error"] == error and metadata[0]["input"] == "1 2\n"
    assert len(calls) == (2 if status == "compile_error" else 4)
    assert one[0] == result and one[1]["case_index"] == 7 and one[1]["status"] == status


def test_the_established_path_of_the_service_asks_it(service):
    reply, error = service_utils.call_sandbox_api(service.url, "print(input())", "a", 5, 5, 64, "python")
    assert error is None and reply["run_result"]["stdout"] == "a\n"
    reply, error = service_utils.call_sandbox_api("http://127.0.0.1:1", "", None, 5, 5, 64)
    assert reply is None and error.startswith("API Call Failed: ")
    assert service_utils.check_correctness(service.url, PAIRS, SUM)[0] == [True] * 3


@pytest.mark.parametrize(
    ("code", "results", "error_code"),
    [
        (SUM, [True] * 3, None),
        ("print(3)", [True, False], -2),
        ("n = input()\nassert n == '1 2'\nprint(3)", [True, -1], -4),
        ("n = input()\nwhile n == '3 4': pass\nprint(3)", [True, -1], -3),
        ("def f(:", [-2], -1),
    ],
)
def test_run_test_stops_at_the_first_failure(code, results, error_code):
    found, details = run_test(PAIRS, test=code, timeout=5)
    assert found == results and details.get("error_code") == error_code
    if error_code in (-2, -3, -4):
        assert details["inputs"] == "3 4\n" and details["expected"] == "7\n"
