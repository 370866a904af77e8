"""Measure the structure of a checkout, and compare it with an earlier revision.

python scripts/count_structure.py                    # this checkout
python scripts/count_structure.py --base v0.3.0      # with a column for a revision, and the change
python scripts/count_structure.py --list clones      # where they are: circles, clones, any, broad-excepts and others
python scripts/count_structure.py --check            # compare with scripts/structure_limits.toml, which CI does
python scripts/count_structure.py --lower            # lower the limits of that file to the present figures
"""

import argparse
import ast
import fnmatch
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = "scripts/structure_limits.toml"
PER_LINES = 10_000
"""Number of lines of code to which a figure that grows with the code is normalized."""
STRICT_PACKAGES = ("protocol", "algos", "single_controller", "workers", "trainer")
PARSERS = ("verl/trainer/config/", "verl/workers/config/")
"""Folders that parse the configuration, and therefore may read keys that might be missing."""
CONFIG_NAME = re.compile(r"^(\w*config|cfg|\w*_cfg|node|\w*_node|section|algorithm|optim)$")
"""Name parts that by convention mark a variable as a part of the configuration."""
CLONE_LINES = 6
CLONE_PLACES = 8
"""Lines that repeat in more places than this are idiom, such as the end of an argument list, and not a clone."""
TOKENS_WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
IMPORTS_OF = """
import json, sys
import grimp
graph = grimp.build_graph("verl", exclude_type_checking_imports=False, cache_dir=None)
json.dump({module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}, sys.stdout)
"""


@dataclass(frozen=True)
class Limit:
    """The limit of a figure, and the target to reach."""

    figure: str
    limit: float
    target: float
    at_least: bool = False
    digits: int = 0

    def holds(self, value: float) -> bool:
        """Return whether a figure keeps the limit, after rounding to the digits of the file."""
        rounded = self.rounded(value)
        return rounded >= self.limit if self.at_least else rounded <= self.limit

    def rounded(self, value: float) -> float:
        """Round a figure to the digits of the file, up or down so that the figure keeps a limit with this value."""
        scale = 10**self.digits
        return (math.floor if self.at_least else math.ceil)(round(value * scale, 6)) / scale


@dataclass(frozen=True)
class Source:
    """One Python file: its path below the checkout, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())


def sources_of(root: Path) -> list[Source]:
    """Read all Python files of the package."""
    return [
        Source(path.relative_to(root).as_posix(), text := path.read_text(encoding="utf-8"), ast.parse(text))
        for path in sorted((root / "verl").rglob("*.py"))
    ]


def code_lines(source: Source) -> int:
    """Count lines of code, without blank lines, comments and docstrings, those of attributes included."""
    with_code: set[int] = set()
    for token in tokenize.tokenize(BytesIO(source.text.encode()).readline):
        if token.type not in TOKENS_WITHOUT_CODE:
            with_code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            with_code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(with_code)


def names_in_code(source: Source, name: str) -> int:
    """Count how often a name occurs outside of strings and comments."""
    tokens = tokenize.tokenize(BytesIO(source.text.encode()).readline)
    return sum(token.type == tokenize.NAME and token.string == name for token in tokens)


def uses_of_any(sources: list[Source]) -> Iterator[str]:
    """Yield the lines that name ``Any`` or an alias of it (``Actor = Any``), quoted annotations included."""
    aliases = {(source.module, name) for source in sources for name in aliases_of_any(source)}
    for source in sources:
        names = {"Any"} | {name for module, name in aliases if module == source.module}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                names |= {each.asname or each.name for each in node.names if (node.module, each.name) in aliases}
        tokens = tokenize.tokenize(BytesIO(source.text.encode()).readline)
        lines = [token.start[0] for token in tokens if token.type == tokenize.NAME and token.string in names]
        lines += [line for line, name in quoted_names(source) if name in names]
        yield from (f"{source.path}:{line}" for line in sorted(lines))


def aliases_of_any(source: Source) -> Iterator[str]:
    """Yield the aliases of ``Any`` in a module, and of unions with ``Any``, which allow just as much."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and "Any" in members(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def members(union: ast.expr) -> set[str]:
    """Return the names in a union such as ``int | Any``; a plain name gives itself."""
    if isinstance(union, ast.BinOp) and isinstance(union.op, ast.BitOr):
        return members(union.left) | members(union.right)
    return {union.id} if isinstance(union, ast.Name) else set()


def quoted_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the names in quoted annotations, with their lines."""
    for node in ast.walk(source.tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from ((part.lineno, name) for name in re.findall(r"\w+", part.value))


def broad_excepts(source: Source) -> Iterator[tuple[int, bool]]:
    """Yield the line of each handler that catches every exception, and whether a comment there gives the reason."""
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(each is None or ast.unparse(each) in ("Exception", "BaseException") for each in caught):
            around = lines[node.lineno - 1 : node.body[0].lineno]
            yield node.lineno, any("#" in line for line in around)


def imports_by_name(source: Source) -> Iterator[str]:
    """Yield the modules of the package whose names are passed to ``importlib.import_module`` as literals."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module")):
            continue
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("verl."):
            yield str(argument.value)


def config_gets(source: Source) -> Iterator[int]:
    """Yield the lines of ``.get(key, default)`` on a part of the configuration."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"):
            continue
        owners = ast.unparse(node.func.value).split(".")
        if len(node.args) + len(node.keywords) == 2 and any(map(CONFIG_NAME.match, owners)):
            yield node.lineno


def tuple_assignments(source: Source) -> Iterator[int]:
    """Yield the lines of ``a, b = x, y``, except where a value reads a target, as in a swap."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Tuple):
                continue
            changed = {ast.unparse(element) for element in target.elts}
            read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.Name | ast.Attribute)}
            if not changed & read:
                yield node.lineno


def clones(sources: list[Source]) -> Iterator[str]:
    """Yield pairs of places with six or more equal lines in a row; imports, comments and punctuation do not count."""
    places: list[str] = []
    texts: list[str] = []
    for source in sources:
        places.append(source.path)
        texts.append(source.path)  # separates files, so that no clone spans two
        for number, line in enumerate(source.text.splitlines(), start=1):
            text = " ".join(line.split())
            if re.search(r"\w", text) and not text.startswith(("#", "import ", "from ")):
                places.append(f"{source.path}:{number}")
                texts.append(text)
    starts: dict[tuple[str, ...], list[int]] = {}
    for at in range(1, len(texts) - CLONE_LINES + 1):
        starts.setdefault(tuple(texts[at : at + CLONE_LINES]), []).append(at)
    for found in starts.values():
        for first, second in itertools.combinations(found, 2):
            if len(found) <= CLONE_PLACES and texts[first - 1] != texts[second - 1]:
                yield f"{places[first]} {places[second]}"


def imports_of(root: Path) -> dict[str, set[str]]:
    """Return the imports of each module of the package, those under ``TYPE_CHECKING`` included.

    Raises: RuntimeError with the message of grimp, if it cannot read the package.
    """
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_OF], cwd=root, env=environment, capture_output=True, encoding="utf-8"
    )
    if done.returncode != 0:
        raise RuntimeError(f"grimp cannot read the imports of {root}/verl:\n{done.stderr[-2000:]}")
    found = {module: set(imported) for module, imported in json.loads(done.stdout).items()}
    for source in sources_of(root):
        found.setdefault(source.module, set()).update(set(imports_by_name(source)) - {source.module})
    return found


def is_strict(path: str, mypy: dict[str, object]) -> bool:
    """Return whether mypy checks a file by the strict rules of pyproject.toml."""
    listed = mypy.get("files", [])
    if not (mypy.get("strict") and isinstance(listed, list)):
        return False
    if not any(path == entry or path.startswith(f"{entry.rstrip('/')}/") for entry in listed):
        return False
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    overrides = mypy.get("overrides", [])
    assert isinstance(overrides, list)
    for override in overrides:
        patterns = override["module"] if isinstance(override["module"], list) else [override["module"]]
        relaxed = override.get("ignore_errors") or override.get("disallow_untyped_defs") is False
        if relaxed and any(fnmatch.fnmatch(module, pattern) for pattern in patterns):
            return False
    return True


def strict_share(sources: list[Source], project: dict[str, object], packages: tuple[str, ...] = ()) -> float:
    """Return the percentage of lines that mypy checks strictly, in some packages or in all of them."""
    tools = project["tool"]
    assert isinstance(tools, dict)
    prefixes = tuple(f"verl/{package}{end}" for package in packages for end in ("/", ".py")) or ("verl/",)
    measured = [source for source in sources if source.path.startswith(prefixes)]
    strict = sum(source.lines for source in measured if is_strict(source.path, tools["mypy"]))
    return 100 * strict / max(1, sum(source.lines for source in measured))


def upward_exceptions(project: dict[str, object], facades: set[str]) -> int:
    """Count the imports that the layer contracts list as exceptions, each once; façades do not count."""
    tools = project["tool"]
    assert isinstance(tools, dict)
    listed = {each for contract in tools["importlinter"]["contracts"] for each in contract.get("ignore_imports", [])}
    return sum(each.split(" -> ")[0] not in facades for each in listed)


def facades_of(root: Path) -> set[str]:
    """Return the paths of the façades, from their table."""
    table = root / "verl/compat/facades.py"
    if not table.exists():
        return set()
    for node in ast.parse(table.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FACADES":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if isinstance(key, ast.Constant)}
    return set()


def places(sources: list[Source]) -> dict[str, list[str]]:
    """Return the places of everything that should go, such as clones, by kind."""
    outside = [source for source in sources if not source.path.startswith(PARSERS)]
    return {
        "config-get": [f"{source.path}:{line}" for source in outside for line in config_gets(source)],
        "tuple-assignments": [f"{source.path}:{line}" for source in sources for line in tuple_assignments(source)],
        "clones": list(clones(sources)),
        "any": list(uses_of_any(sources)),
        "broad-excepts": [f"{source.path}:{line}" for source in sources for line, _ in broad_excepts(source)],
        "excepts-without-reason": [
            f"{source.path}:{line}"
            for source in sources
            for line, has_reason in broad_excepts(source)
            if not has_reason
        ],
    }


def count(root: Path) -> dict[str, float]:
    """Return all figures of a checkout."""
    from scripts.import_circles import circles

    sources = sources_of(root)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found = circles(imports_of(root))
    where = places(sources)
    text = "\n".join(source.text for source in sources)
    comments = sum(
        token.type == tokenize.COMMENT
        for source in sources
        for token in tokenize.tokenize(BytesIO(source.text.encode()).readline)
    )
    return {
        "import circles, types included": len(found),
        "modules in circles": sum(map(len, found)),
        "exceptions from the layers": upward_exceptions(project, facades_of(root)),
        "Any, aliases of it included": len(where["any"]),
        "object": sum(names_in_code(source, "object") for source in sources),
        "cast(": sum(names_in_code(source, "cast") for source in sources),
        "type: ignore": len(re.findall(r"#\s*type:\s*ignore", text)),
        "broad excepts": len(where["broad-excepts"]),
        "broad excepts without a reason": len(where["excepts-without-reason"]),
        ".get(key, default) on config": len(where["config-get"]),
        "tuple-assignments": len(where["tuple-assignments"]),
        f"clones of {CLONE_LINES} lines or more, pairs": len(where["clones"]),
        "mypy strict, % of all lines": strict_share(sources, project),
        f"mypy strict, % of {', '.join(STRICT_PACKAGES)}": strict_share(sources, project, STRICT_PACKAGES),
        "files": len(sources),
        "lines": sum(source.lines for source in sources),
        "lines of code": sum(map(code_lines, sources)),
        "comments per 100 lines of code": 100 * comments / max(1, sum(map(code_lines, sources))),
        "median lines of a file": statistics.median(source.lines for source in sources),
    }


def limits_of(root: Path) -> list[Limit]:
    """Read the limits of a checkout.

    Raises: ValueError for a limit that is stricter than the figure to reach.
    """
    table = tomllib.loads((root / LIMITS).read_text(encoding="utf-8"))
    found = [
        Limit(figure, **entry, at_least=group == "at_least", digits=group != "at_most")
        for group, entries in table.items()
        for figure, entry in entries.items()
    ]
    return found


def related(figures: dict[str, float], limits: list[Limit]) -> dict[str, float]:
    """Return the figure for each limit; a figure that grows with the code is given per 10,000 lines of code."""
    grows = PER_LINES / max(1.0, figures["lines of code"])
    return {each.figure: figures[each.figure] * (grows if each.digits and not each.at_least else 1) for each in limits}


def check(root: Path) -> list[str]:
    """Print the figures next to their limits, and return a message for each broken limit."""
    limits = limits_of(root)
    values = related(count(root), limits)
    rows = [
        f"| {each.figure} | {each.rounded(values[each.figure]):g} | {each.limit:g} | {each.target:g} |"
        for each in limits
    ]
    print(
        "\n".join(["| per 10,000 lines of code, or absolute | now | limit | to reach |", "|---|---:|---:|---:|", *rows])
    )
    return [
        f"{each.figure}: {each.rounded(values[each.figure]):g} is {'below' if each.at_least else 'above'} the limit of "
        f"{each.limit:g} in {LIMITS}: python scripts/count_structure.py --list shows the places"
        for each in limits
        if not each.holds(values[each.figure])
    ]


def lower(root: Path) -> None:
    """Lower the limits in the file to the present figures, where these are stricter."""
    limits = limits_of(root)
    values = related(count(root), limits)
    text = (root / LIMITS).read_text(encoding="utf-8")
    for each in limits:
        if each.holds(values[each.figure]):
            entry = re.compile(rf'^("{re.escape(each.figure)}" = {{ limit = )[\d.]+', re.MULTILINE)
            text = entry.sub(rf"\g<1>{each.rounded(values[each.figure]):g}", text)
    (root / LIMITS).write_text(text, encoding="utf-8")


def checkout(revision: str, folder: Path) -> Path:
    """Write the tree of a revision to a folder and return it.

    Raises: ValueError for a revision that git does not know.
    """
    command = ["git", "archive", revision, "verl", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        raise ValueError(f"--base {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def table(columns: dict[str, dict[str, float]]) -> str:
    """Return the figures as a Markdown table; two columns of figures get a third one with the change."""

    def cell(value: float, sign: str = "") -> str:
        return f"{value:{sign},.0f}" if float(value).is_integer() else f"{value:{sign},.1f}"

    names = list(columns)
    change = len(names) == 2
    rows = ["| | " + " | ".join([*names, *(["change"] if change else [])]) + " |"]
    rows.append("|---|" + "---:|" * (len(names) + change))
    for figure in columns[names[0]]:
        values = [columns[name][figure] for name in names]
        cells = [cell(value) for value in values]
        if change:
            cells.append(cell(round(values[1] - values[0], 1), "+"))
        rows.append(f"| {figure} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Print the figures or, with --list, the places that they count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to measure (this one)")
    parser.add_argument("--base", metavar="REV", help="git revision to compare with")
    kinds = ["circles", "clones", "config-get", "tuple-assignments", "any", "broad-excepts", "excepts-without-reason"]
    parser.add_argument("--list", choices=kinds, help="print places instead")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if a figure breaks its limit in {LIMITS}")
    parser.add_argument("--lower", action="store_true", help="lower the limits to the present figures")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    if options.lower:
        lower(root)
    if options.check and (broken := check(root)):
        sys.exit("\n".join(broken))
    if options.check or options.lower:
        return
    if options.list == "circles":
        from scripts.import_circles import circles

        print("\n".join(", ".join(circle) for circle in circles(imports_of(root))))
        return
    if options.list:
        print("\n".join(places(sources_of(root))[options.list]))
        return
    columns = {}
    if options.base:
        with tempfile.TemporaryDirectory() as folder:
            columns[options.base] = count(checkout(options.base, Path(folder)))
    columns["now"] = count(root)
    print(table(columns))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
