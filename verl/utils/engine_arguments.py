"""The names of an engine's arguments, read without importing the engine, which takes seconds."""

import ast
import importlib.util
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from verl.base_config import nearest


@cache
def sglang_arguments() -> frozenset[str]:
    """Return the names of the arguments of SGLang's ``ServerArgs``; none if SGLang is not installed.

    Since 0.5.21 they are the annotated names of the classes in ``srt/arg_groups/fields``.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [each for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
    return frozenset(field.target.id for field in fields if isinstance(field.target, ast.Name))


def unknown_sglang_arguments(given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that is no argument of SGLang, and what is wrong with it; nothing if SGLang is not installed."""
    known = sglang_arguments()
    for name in given if known else ():
        if name not in known:
            yield name, f"is no argument of SGLang; the nearest: {', '.join(nearest(name, known))}"
