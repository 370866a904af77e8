"""The figures of a small package, and the contract against import circles."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.count_structure import count, main
from scripts.import_circles import circles

ROOT = Path(__file__).resolve().parents[2]
ALPHA = '''"""Docstring."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.beta import B

# A comment.
first, second = 1, 2
first, second = second, first


def read(config: Any, table: dict) -> "B":
    """Docstring of
    two lines."""
    table.get("key", 0)
    config.get("key")
    return config.model.get("key", 0), config.get("key", default=1)  # type: ignore
'''
PROJECT = """
[tool.mypy]
strict = true
files = ["verl/protocol.py", "verl/algos"]

[[tool.mypy.overrides]]
module = "verl.algos.loose"
ignore_errors = true

[tool.importlinter]
contracts = [{ ignore_imports = ["verl.a -> verl.b"] }]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout whose figures can be counted by hand."""
    files = {
        "pyproject.toml": PROJECT,
        "verl/__init__.py": "",
        "verl/alpha.py": ALPHA,
        "verl/beta.py": "import verl.alpha\n\n\nclass B(object):\n    pass\n",
        "verl/protocol.py": "x = 1\n" * 3,
        "verl/algos/__init__.py": "",
        "verl/algos/loose.py": "x = 1\n",
        "verl/trainer/config/parse.py": 'config = {}\nconfig.get("key", 0)\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures_of_a_small_package(package: Path) -> None:
    assert count(package) == {
        "import circles, types included": 1,
        "modules in circles": 2,
        "exceptions from the layers": 1,
        "Any": 2,
        "object": 1,
        "cast(": 0,
        "type: ignore": 1,
        ".get(key, default) on config": 2,
        "tuple-assignments": 1,
        "clones of 6 lines or more, pairs": 0,
        "mypy strict, % of all lines": pytest.approx(100 * 3 / 29),
        "mypy strict, % of protocol, algos, single_controller, workers, trainer": pytest.approx(100 * 3 / 6),
        "files": 7,
        "lines": 29,
        "lines of code": 18,
        "median lines of a file": 2,
    }


def test_a_clone_is_a_run_of_code_at_two_places(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = "".join(f"value = step_{number}(value)\n" for number in range(7))
    (package / "verl" / "one.py").write_text(f"import os\n\n{run}")
    (package / "verl" / "two.py").write_text(f"# A comment.\nfirst = 1\n{run.replace('(value)', '( value )', 1)}")
    (package / "verl" / "three.py").write_text(run.replace("step_3", "other"))  # runs of three lines
    main([str(package), "--list", "clones"])
    assert capsys.readouterr().out == "verl/one.py:4 verl/two.py:4\n"


def test_places_are_printed(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(package), "--list", "tuple-assignments"])
    assert capsys.readouterr().out == "verl/alpha.py:9\n"
    main([str(package), "--list", "circles"])
    assert capsys.readouterr().out == "verl.alpha, verl.beta\n"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": {"e"}, "e": {"c", "d"}}, [["c", "d", "e"], ["a", "b"]]),
    ],
)
def test_circles(imports: dict[str, set[str]], expected: list[list[str]]) -> None:
    assert circles(imports) == expected


def test_the_contract_names_the_imports_of_a_circle_of_types(package: Path) -> None:
    contract = (ROOT / ".importlinter-types.toml").read_text().partition("ignore_imports")[0]
    (package / ".importlinter-types.toml").write_text(contract)
    lint = (
        f"import sys; sys.path[:0] = [{str(package)!r}, {str(ROOT)!r}]; "
        "from importlinter.cli import lint_imports_command as run; run()"
    )
    command = [sys.executable, "-c", lint, "--config", ".importlinter-types.toml", "--no-cache"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert done.returncode == 1
    assert "- verl.alpha -> verl.beta" in done.stdout and "- verl.beta -> verl.alpha" in done.stdout, done.stdout
    (package / "verl" / "beta.py").write_text("class B:\n    pass\n")
    done = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
