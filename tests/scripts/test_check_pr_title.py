"""Titles of pull requests: which are right, and what is said about the others."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_pr_title import MODULES, TYPES, problems

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "title",
    [
        "[rollout] fix: the engine keeps its cache",
        "[fsdp, megatron] feat: export of adapters",
        "[fsdp,megatron] feat: export of adapters",
        "[BREAKING][trainer] refactor: fit takes no arguments",
        "[BREAKING] [trainer] refactor: fit takes no arguments",
        "[docs] docs: a page on x: y",
        "[doc] docs: a page on x",
    ],
)
def test_right_titles(title: str) -> None:
    assert problems(title) == []


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("fix the cache", "the form is"),
        ("[rollout] the cache", "the form is"),
        ("[rollout] fix the cache: now", "the form is"),
        ("[rollout]fix: the cache", "the form is"),
        ("[rollout] fix:", "the form is"),
        ("[rollout][vllm] fix: the cache", "the form is"),
        ("[breaking][rollout] fix: the cache", "the form is"),
        ("[rollout] [BREAKING] fix: the cache", "the form is"),
        ("[] fix: the cache", "unknown modules ['']"),
        ("[cache, rollout] fix: it", "unknown modules ['cache']"),
        ("[rollout, rollout] fix: it", "named twice"),
        ("[rollout] repair: the cache", "unknown type 'repair'"),
        ("[rollout] fix: the cache.", "without a period"),
        ("[rollout] fix: " + "x" * 120, "135 characters"),
    ],
)
def test_wrong_titles(title: str, said: str) -> None:
    assert any(said in problem for problem in problems(title)), problems(title)


def test_every_problem_is_named_at_once() -> None:
    assert len(problems("[cache] repair: it.")) == 3


def test_packages_are_modules() -> None:
    """Every package of ``verl/`` can be named, except the one that holds what is not settled yet."""
    packages = {path.parent.name for path in (ROOT / "verl").glob("*/__init__.py")}
    assert packages - {"experimental", "model_merger"} <= MODULES


def test_the_page_lists_what_the_script_knows() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert all(f"`{name}`" in page for name in TYPES)


@pytest.mark.parametrize(("arguments", "code"), [(["[ci] fix: it"], 0), (["it"], 1), ([], 2)])
def test_exit_code(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "scripts/check_pr_title.py", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == code
