"""Every text file is opened as UTF-8, whatever the locale."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for folder in ("verl", "recipe", "scripts", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]

NO_TEXT = {"os", "Image", "av", "tarfile", "zipfile", "files", "opener"}
"""Owners of another ``open`` or ``write_text`` than that of Python's text files."""
MODES = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Functions that open a file, and the place of their mode."""


def called(call: ast.Call) -> tuple[str | None, str | None]:
    """Return the name of a function, and that of its module or object; None where it has no name."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr, function.value.id if isinstance(function.value, ast.Name) else ""
    return getattr(function, "id", None), None


def mode_of(call: ast.Call, place: int) -> str | None:
    found = call.args[place] if len(call.args) > place else None
    found = next((each.value for each in call.keywords if each.arg == "mode"), found)
    return found.value if isinstance(found, ast.Constant) else None


def lacks_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the locale."""
    name, owner = called(call)
    given = {each.arg for each in call.keywords}
    if "encoding" in given or None in given or (owner in NO_TEXT and name in ("open", "write_text")):
        return False
    if name in ("run", "Popen", "check_output"):
        return bool(given & {"text", "universal_newlines"})
    if name in ("read_text", "write_text"):
        return len(call.args) <= (name == "write_text")
    if name == "FileHandler":
        return True
    if name not in MODES:
        return False
    is_method = name == "open" and owner is not None
    default = "w+b" if name.endswith("TemporaryFile") else "r"
    return "b" not in (mode_of(call, 0 if is_method else MODES[name]) or default)


def without_encoding(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and lacks_encoding(node):
            yield node.lineno


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='a')", True),
        ("(folder / 'a').open('w')", True),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("os.fdopen(fd, 'w')", True),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("open(path, 'rb')", False),
        ("path.open('wb')", False),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("os.open(path, flags)", False),
        ("Image.open(path)", False),
        ("tempfile.NamedTemporaryFile()", False),
        ("subprocess.run(command)", False),
    ],
)
def test_the_check_finds_what_reads_in_the_encoding_of_the_locale(line: str, is_found: bool) -> None:
    assert list(without_encoding(line)) == [1] * is_found


def test_text_files_are_utf_8() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in without_encoding(path.read_text("utf-8"))
    ]
    assert found == [], "write encoding='utf-8'"
