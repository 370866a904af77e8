"""The commands on all pages: configurations compose, scripts and modules exist, options are theirs."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.special_sanity.test_docs import PAGES
from tests.special_sanity.test_examples import CONFIG_OF_MODULE, commands_of_script, compose_command

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
NOT_OURS = {"pip", "venv", "pytest"}
"""Modules of others that a page runs."""


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Yield the fenced blocks in one of the languages."""
    for _, language, text in BLOCK.findall(page.read_text()):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each simple command on a page: in its shell blocks, and in the texts of its YAML blocks."""
    for text in [*blocks(page, "bash", "sh", "shell"), *texts_of_yaml(page)]:
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            plain = re.sub(r"\$\w+", "1", line.replace("<", "_").replace(">", "_"))
            command: list[str] = []
            for word in [*shlex.split(plain, comments=True), ";"]:
                if word not in (";", "&&", "||", "|", "&"):
                    command += [word] if word != "..." else []
                elif command:
                    yield command
                    command = []


def texts_of_yaml(page: Path) -> Iterator[str]:
    """Yield the texts in the YAML blocks of a page that run Python."""
    waiting = [document for block in blocks(page, "yaml") for document in yaml.safe_load_all(block)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and "python" in value:
            yield value
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []


def our_command(words: list[str]) -> tuple[Path, list[str]] | None:
    """Return the file of this repository that a command runs, and its arguments; None for other programs.

    Raises: AssertionError for a file or module that does not exist.
    """
    for position, word in enumerate(words):
        if re.fullmatch(r"(.*/)?(python[\d.]*|bash|sbatch|sh)", word):
            rest = words[position + 1 :]
            if rest[:1] == ["-m"] and len(rest) > 1:
                return None if rest[1].split(".")[0] in NOT_OURS else (module_file(rest[1]), rest[2:])
            file = next((argument for argument in rest if not argument.startswith("-")), "")
            if re.match(r"(scripts|benchmarks|examples|recipe|docker|\.ci)/", file):
                assert (ROOT / file).is_file(), f"no file {file}"
                return ROOT / file, rest[rest.index(file) + 1 :]
            return None
    return None


def module_file(name: str) -> Path:
    """Return the file that ``python -m name`` runs."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"no module {name}"
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None and spec.origin, f"python -m {name} runs nothing"
    return Path(spec.origin)


def known_options(file: Path) -> str:
    """Return the text that defines the options of a command: its file, and our modules that it imports."""
    texts = [file.read_text()]
    for module in re.findall(
        r"^\s*(?:from|import) ((?:verl|scripts|recipe|tests)[\w.]*)", texts[0], flags=re.MULTILINE
    ):
        path = ROOT.joinpath(*module.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                texts.append(found.read_text())
    return "\n".join(texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_would_run(page: Path, tmp_path: Path) -> None:
    for number, words in enumerate(commands(page)):
        if set(words) & set(CONFIG_OF_MODULE):
            compose_command(words)
            continue
        command = our_command(words)
        if command is None:
            continue
        file, arguments = command
        launches = file.suffix == ".sh" and file.is_relative_to(ROOT / "examples") or file.name.startswith("run_")
        if launches:
            folder = tmp_path / str(number)
            folder.mkdir()
            for launch in commands_of_script(file, folder, arguments):
                if set(launch) & set(CONFIG_OF_MODULE):
                    compose_command(launch)
            continue
        options = known_options(file)
        for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
            if re.match(r"--?[a-z]", argument) and argument not in ("--help", "-h"):
                name = argument.split("=")[0]
                assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", options), f"{file.name} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_yaml_blocks_parse_and_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "yaml"):
        list(yaml.safe_load_all(block))
    for block in blocks(page, "python"):
        lines = block.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        compile("\n".join(line[indent:] for line in lines), str(page), "exec")


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\npython scripts/suite_times.py --sinse REV\nRUN=1 python -m verl.utils.gone && ls\n```\n")
    first, second, third = commands(page)
    file, arguments = our_command(first)
    assert file.name == "suite_times.py" and arguments == ["--sinse", "REV"] and "--sinse" not in known_options(file)
    with pytest.raises(AssertionError, match="no module verl.utils.gone"):
        our_command(second)
    assert our_command(third) is None
