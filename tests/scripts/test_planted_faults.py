"""The planted faults fit the code, and the command tells those that tests catch from those that they miss."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from scripts.planted_faults import __main__ as planted_faults
from scripts.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


def test_each_fault_fits_the_code() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 60
    for fault in FAULTS:
        ast.parse(planted_faults.planted(fault, ROOT))
        assert fault.old != fault.new, fault.name
        assert all((ROOT / tests).exists() for tests in fault.tests), fault.name


@pytest.mark.parametrize("name", ["results.json", "results_after.json"])
def test_the_committed_results_belong_to_the_faults(name: str) -> None:
    results = planted_faults.read_results(ROOT / "scripts" / "planted_faults" / name)
    tests = {fault.name: fault.tests for fault in FAULTS}
    for name, result in results.items():
        named = any(result.by.startswith(test) for test in tests[name])
        assert named if result.outcome == planted_faults.CAUGHT else not result.by, name


CODE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = "from code_under_test import double\n\ndef test_double():\n    assert double(2) == 4\n"
BROKEN = "def test_that_never_passes():\n    assert False\n"


def fault(name: str, old: str, new: str, tests: str = "test_code.py") -> Fault:
    return Fault(name, "code_under_test.py", old, new, (tests,), "")


CASES = {
    fault("wrong-factor", "2 * x", "3 * x"): (planted_faults.CAUGHT, "test_code.py::test_double"),
    fault("no-test-looks", "x / 2", "x / 3"): (planted_faults.MISSED, ""),
    fault("no-such-name", "def half", "half()\n\n\ndef half"): (planted_faults.NO_IMPORT, ""),
    fault("no-fault", "2 * x", "x * 2", "test_broken.py"): (
        planted_faults.FAILS_ANYWAY,
        "test_broken.py::test_that_never_passes",
    ),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    for name, text in {"code_under_test.py": CODE, "test_code.py": TESTS, "test_broken.py": BROKEN}.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def test_outcomes_and_comparison(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planted_faults, "FAULTS", tuple(CASES))
    before = tmp_path / "before.json"
    was_caught = {"outcome": planted_faults.CAUGHT, "seconds": 1.0, "by": "test_code.py::test_half"}
    before.write_text(json.dumps({"no-test-looks": was_caught}))
    after = tmp_path / "after.json"
    options = ["--tree", str(tree), "-n", "2", "--json", str(after), "--compare", str(before)]
    assert planted_faults.main(options) == 1
    results = planted_faults.read_results(after)
    assert {name: (result.outcome, result.by) for name, result in results.items()} == {
        each.name: expected for each, expected in CASES.items()
    }
    assert (tree / "code_under_test.py").read_text() == CODE
    shown = capsys.readouterr().out
    assert "1 of 4 faults are caught" in shown
    assert shown.rstrip().endswith(f"caught in {before}, and not now: no-test-looks")
    assert planted_faults.main(["--tree", str(tree), "wrong-factor"]) == 0


def test_a_timeout_catches_nothing() -> None:
    """A busy machine does that too."""
    for message, outcome in (
        ("Failed: Timeout (>300.0s) from pytest-timeout.", planted_faults.TIMED_OUT),
        ("AssertionError: assert 3 == 4", planted_faults.CAUGHT),
    ):
        found = planted_faults.result_of(1, f"F\nFAILED test_code.py::test_double - {message}\n", 1.0)
        assert found == planted_faults.Result(outcome, 1.0, "test_code.py::test_double", message)


def test_what_does_not_fit_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(planted_faults.FaultError, match="gone: code_under_test.py has the text to replace 0 times"):
        planted_faults.planted(fault("gone", "4 * x", ""), tree)
    monkeypatch.setattr(planted_faults, "FAULTS", (fault("no-test", "2 * x", "3 * x", "no_such_test.py"),))
    with pytest.raises(planted_faults.FaultError, match="no fault is called no-such-fault"):
        planted_faults.main(["no-such-fault"])
    with pytest.raises(planted_faults.FaultError, match="no test ran for -x no_such_test.py"):
        planted_faults.main(["--tree", str(tree), "no-test"])
