"""Check the YAML style: above each key a comment with its indentation, a blank line between keys, no inline comments.

python scripts/check_yaml_style.py [files or folders]     # default: verl/trainer/config and recipe
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w\-.]+):(?P<rest>.*)$")
INLINE_COMMENT = re.compile(r"\s#")
LIST_OF_CLASSES = re.compile(r"^(tools|interaction):", re.MULTILINE)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, problem) for one file."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        yield (mark.line + 1 if mark else 1), f"no YAML: {getattr(error, 'problem', None) or error}"
        return
    if not isinstance(content, dict | list):
        yield 1, "no keys: write a mapping or a list"
        return
    lines = text.splitlines()
    first_key = True
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if INLINE_COMMENT.search(QUOTED.sub("", line)):
            yield number, "inline comment: move it to the line above the key"
        match = KEY.match(line)
        if match is None:
            continue
        above = number - 2
        if above < 0 or not lines[above].lstrip().startswith("#"):
            yield number, f"no comment above the key {match['key']!r}"
        while above >= 0 and lines[above].lstrip().startswith("#"):
            if not lines[above].startswith(f"{match['indent']}#"):
                yield above + 1, f"the comment does not begin in the column of its key {match['key']!r}"
            above -= 1
        if not first_key and (above < 0 or lines[above].strip()):
            yield number, f"no blank line before the comment of {match['key']!r}"
        first_key = False


def yaml_files(paths: list[Path]) -> Iterator[Path]:
    """Yield the YAML files under the given paths, except generated files and lists of tools or interactions."""
    for path in paths:
        found = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
        for file in found:
            is_config = not file.name.startswith("_generated") and file.name != "runtime_env.yaml"
            if is_config and not LIST_OF_CLASSES.search(file.read_text(encoding="utf-8")):
                yield file


def main(arguments: list[str]) -> int:
    """Print every problem and return the exit code."""
    roots = [Path(argument) for argument in arguments] or [Path("verl/trainer/config"), Path("recipe")]
    found = [f"{root}: no such file or folder" for root in roots if not root.exists()]
    files = list(yaml_files([root for root in roots if root.exists()]))
    found += [
        f"{file}:{number}: {text}" for file in files for number, text in problems(file.read_text(encoding="utf-8"))
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found) or f"{len(files)} YAML files follow the style\n")
    return min(1, len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
