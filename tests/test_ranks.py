"""What is told of ranks that fail, die or hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import RankError, Ranks, note
from tests.waiting import wait_until


def _fails(rank: int) -> None:
    note("the first case")
    if rank:
        pytest.fail("the numbers differ")


def _dies(rank: int) -> None:
    note("the first case")
    note("the second case")
    os.kill(os.getpid(), signal.SIGSEGV)


def _hangs(rank: int, started: Path) -> None:
    note("the last case")
    started.touch()
    time.sleep(3600)


def told(ranks: Ranks, timeout_s: float = 120.0) -> list[str]:
    with pytest.raises(RankError) as raised:
        ranks.join(timeout_s)
    lines = str(raised.value).splitlines()
    assert len(lines) < 30, lines
    return lines


def test_a_failure_names_rank_case_and_cause() -> None:
    lines = told(Ranks(_fails, (), nprocs=2))
    assert (lines[0], lines[-1]) == ("rank 1 failed in the first case:", "Failed: the numbers differ")


def test_a_death_names_the_signal_and_where_it_came() -> None:
    lines = told(Ranks(_dies, (), nprocs=1))
    assert lines[:2] == ["rank 0 died by SIGSEGV in the second case:", "Fatal Python error: Segmentation fault"]
    assert any(line.endswith("in _dies") for line in lines)


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    ranks = Ranks(_hangs, (tmp_path / "started",), nprocs=1)
    wait_until((tmp_path / "started").exists)
    lines = told(ranks, 0.5)
    assert lines[:2] == ["ranks [0] did not end within 0.5 s", "rank 0 in the last case:"]
    assert any(line.endswith("in _hangs") for line in lines)


TESTS = """
import pytest

class RankError(Exception):
    pass

@pytest.fixture(scope="module")
def results():
    raise RankError("rank 1 died by SIGSEGV in the second case:\\nstack")

def test_one(results): pass
def test_two(results): pass
def test_other(): pass
"""


def test_ranks_that_fail_are_reported_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    assert "1 passed, 1 skipped, 1 error" in told, told
    assert told.count("died by SIGSEGV") <= 2 and "its ranks failed, see test_it.py::test_one" in told
    assert "def results" not in told
