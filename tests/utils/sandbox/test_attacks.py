"""Attacks on the sandbox get no marks, do not learn the answer, leave the host alone, and end in time."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.utils.sandbox import attacks
from tests.utils.sandbox.attacks import ATTACKS, KINDS, QUICK, TAILS, Host, program, task
from verl.utils.reward_score import prime_code, sandbox_fusion
from verl.utils.reward_score.code_tests import Metadata, Result
from verl.utils.sandbox import isolation_problem

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")

TIMEOUT_S = 1.0
SLACK_S = 2.0
Check = Callable[..., tuple[list[Result], list[Metadata]]]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Make what no program may reach, and look at it afterwards."""
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / "secret"
    secret.write_text(f"EXP{secrets.token_hex(8)}")
    before = secret.read_text()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(86400)"])
    planted = f"verl-attack-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield Host(str(secret), f"/tmp/{planted}", sleeper.pid, server.getsockname()[1])
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    assert sleeper.poll() is None, "a program has ended another process"
    sleeper.kill()
    sleeper.wait()
    assert secret.read_text() == before and os.listdir(folder) == ["secret"]
    places = [folder, Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"), Path.home()]
    assert [place for place in places if (place / planted).exists()] == []


def attack(check: Check, kind: str, names: list[str], code: str, host: Host) -> dict[str, str]:
    """Check a program on one case for each attack and return what succeeded, by attack."""
    words = {name: f"EXP{secrets.token_hex(8)}" for name in names}
    results, metadata = check(task(kind, words), code, timeout=TIMEOUT_S)
    said = {each["case_index"]: each for each in metadata if "case_index" in each}
    succeeded = {}
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        shown = said.get(index, {})
        text = f"{shown.get('stdout')}{shown.get('stderr')}"
        if result is True:
            succeeded[name] = "has full marks"
        elif words[name][::-1] in text:
            succeeded[name] = "knows the answer"
        elif Path(host.secret).read_text()[::-1] in text or host.planted[::-1] in text:
            succeeded[name] = "has reached the host"
        elif (shown.get("seconds") or 0) > 2 * TIMEOUT_S + SLACK_S:
            succeeded[name] = f"took {shown['seconds']:.1f} s"
    return succeeded


def attack_each(check: Check, kind: str, names: list[str], host: Host) -> dict[str, str]:
    """Run each attack when the program loads, in a program for itself."""
    succeeded = {}
    for name in names:
        code = program(host, [name], at_load=True, from_stdin=kind == "stdin")
        succeeded |= attack(check, kind, [name], code, host)
    return succeeded


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_does_the_work_has_full_marks(kind):
    words = {name: f"EXP{secrets.token_hex(8)}" for name in list(QUICK)[:3]}
    code = f"def f(name): return {words!r}[name]\nclass Solution:\n    def f(self, name): return f(name)\n"
    code += "print(f(input()))" if kind == "stdin" else ""
    assert prime_code.check_correctness(task(kind, words), code)[0] == [True] * 3


CALLED = {
    "assertion": list(QUICK),
    "check": list(attacks.EXCHANGE),
    "solution": list(attacks.EXCHANGE),
    "function": list(attacks.OBJECTS),
    "stdin": list(attacks.ENDS | attacks.DESCRIPTORS | attacks.FLOODS),
}
"""Kind of task -> attacks that run in CI when the function is called."""


@pytest.mark.parametrize("kind", CALLED)
def test_attacks_when_the_function_is_called(kind, host):
    code = program(host, CALLED[kind], from_stdin=kind == "stdin")
    assert attack(prime_code.check_correctness, kind, CALLED[kind], code, host) == {}


def test_attacks_when_the_program_loads(host):
    names = list(attacks.BUILTINS | attacks.FRAMES)
    assert attack_each(prime_code.check_correctness, "assertion", names, host) == {}


@pytest.mark.parametrize("kind", ["element", "both", "bounds", "mapped"])
def test_attacks_on_the_rules_of_trust(kind, host):
    """They run when the program loads, and again when the function is called."""
    assert attack_each(prime_code.check_correctness, kind, list(attacks.TRUST), host) == {}


def test_attacks_that_take_for_ever(host):
    names = ["a loop that catches all", "stop", "an error that takes for ever to print"]
    assert attack(prime_code.check_correctness, "assertion", names, program(host, names), host) == {}


@pytest.mark.parametrize("name", TAILS)
def test_ends_of_a_program_that_swallow_what_follows(name, host):
    code = f"def f(name): return name\n{TAILS[name]}"
    assert attack(prime_code.check_correctness, "assertion", ["_exit"], code, host) == {}


def test_attacks_on_the_remote_wrapper(host, service):
    names = list(attacks.BUILTINS | attacks.ENDS)
    check = partial(sandbox_fusion.check_correctness, service.url)
    assert attack(check, "assertion", names, program(host, names), host) == {}


# ---- the whole matrix


ASKED = list(attacks.OBJECTS | attacks.EXCHANGE | attacks.TRUST)
FULL = {kind: ASKED if kind in ("element", "both", "bounds", "mapped") else list(ATTACKS) for kind in KINDS}
"""Kind of task -> attacks; the last kinds differ from the others in what the checker asks."""


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_all_attacks_when_the_function_is_called(kind, host):
    code = program(host, FULL[kind], from_stdin=kind == "stdin")
    assert attack(prime_code.check_correctness, kind, FULL[kind], code, host) == {}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_all_attacks_when_the_program_loads(kind, host):
    assert attack_each(prime_code.check_correctness, kind, FULL[kind], host) == {}


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stdin"])  # without test code nothing is wrapped
def test_all_attacks_on_the_remote_wrapper(kind, host, service):
    """The host is for the service to protect."""
    check = partial(sandbox_fusion.check_correctness, service.url)
    names = [name for name in FULL[kind] if name not in attacks.HOST | attacks.FLOODS]
    assert attack(check, kind, names, program(host, names), host) == {}
    assert attack_each(check, kind, names, host) == {}
