r"""The parts of a mathematical answer in LaTeX, and whether two answers have the same parts.

An answer is read as a tree of lists, sets, intervals, unions, matrices and relations, down to single values. Two
answers are the same if their trees are. ``same_values`` compares values as texts and as rational numbers; a caller that
knows algebra passes a judge of its own.

A name (``x =``) or a unit (``\text{ cm}``) that only one of two answers writes does not count. If both write one, both
must write the same.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from verl.utils.reward_score.latex_tokens import (
    CONNECTIVES,
    ROW_BREAK,
    content,
    is_text,
    normal_form,
    stripped,
    tokenize,
)
from verl.utils.reward_score.quantities import Unit, rational, split_unit

LONGEST_CHARS = 2000
DEEPEST = 50  # brackets inside brackets
MOST_PARTS = 200  # of a set: its parts are compared pairwise

_WORDS = re.compile(r"(?:[A-Z]?[a-z]{2,}+)++|No")
_NAME = re.compile(
    r"[a-zA-Z](?:_\{\w{1,3}\}|\^\{-1\}|')*(?:\(\w{1,3}\))?|[A-Z]{2,3}|m?\\angle ?[A-Z]{1,3}"
    r"|\\(?:alpha|beta|gamma|theta|phi)|\([a-z](?:,[a-z])+\)"
)
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]|\\(?:alpha|beta|gamma|theta|phi)")
_LISTED = (",", ";")
_RELATIONS = (r"\le", r"\ge", r"\ne", "<", ">", "=", r"\in", r"\approx")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_SET = r"\{ \}"
_INTERVALS = ("( )", "( ]", "[ )", "[ ]", "union")
_UNORDERED = (_SET, *CONNECTIVES, "union")


class Judge(NamedTuple):
    """Decides whether texts in normal form, without units, are equal."""

    values: Callable[[str, str], bool]
    equations: Callable[[str, str], bool] = lambda one, other: False
    """Whether ``one = 0`` and ``other = 0`` are the same equation."""


class Tree(NamedTuple):
    """An answer: a value, or parts of one kind."""

    kind: str
    text: str = ""  # the value, the name, or the relations between the parts
    parts: "tuple[Tree, ...]" = ()
    unit: Unit = Unit()


def same(one: str, other: str, judge: Judge | None = None) -> bool:
    """Return whether two answers have the same parts, which ``judge`` compares; by default by ``same_values``.

    Longer answers than ``LONGEST_CHARS`` are compared as texts.
    """
    if max(len(one), len(other)) > LONGEST_CHARS:
        return one.strip() == other.strip()
    return _same(_read(tokenize(one)), _read(tokenize(other)), judge or Judge(same_values))


def same_values(one: str, other: str) -> bool:
    """Return whether two values in normal form are the same text or the same rational number."""
    if one == other or _terms(one) == _terms(other):
        return bool(one)
    if one.lower() == other.lower() and _WORDS.fullmatch(one) and _WORDS.fullmatch(other):
        return True
    number = rational(one)
    return number is not None and number == rational(other)


def _terms(value: str) -> list[str]:
    """Return the terms of a sum with their signs, sorted."""
    terms, signs = _split(tokenize(value), ("+", "-"))
    signed = [sign + "".join(term) for sign, term in zip(["+", *signs], terms, strict=True)]
    return sorted(signed[not terms[0] :])


# ---- reading


def _read(tokens: Sequence[str], depth: int = 0) -> Tree:
    tokens = stripped(tokens)
    if depth > DEEPEST:
        return Tree("value", normal_form(tokens))
    if len(tokens) == 1 and is_text(tokens[0]):
        return _read(tokenize(content(tokens[0])), depth + 1)

    def read_all(pieces: Sequence[Sequence[str]]) -> tuple[Tree, ...]:
        return tuple(_read(piece, depth + 1) for piece in pieces)

    for separators in _lists(tokens):
        pieces, found = _split(tokens, separators)
        if found:
            kind = found[-1] if found[-1] in CONNECTIVES else "list"
            return _list(kind, read_all([piece for piece in pieces if piece or kind == "list"]))
    sides, relations = _split(tokens, _RELATIONS)
    if relations:
        return _read_named(sides, relations, depth) or Tree("relation", " ".join(relations), read_all(sides))
    intervals, cups = _split(tokens, (r"\cup",))
    if cups:
        return Tree("union", "", read_all(intervals))
    if r"\pm" in tokens or r"\mp" in tokens:
        signs = [{r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}]
        return Tree("or", "", read_all([[sign.get(token, token) for token in tokens] for sign in signs]))
    return _read_enclosed(tokens, depth) or _read_value(tokens)


def _lists(tokens: Sequence[str]) -> list[Collection[str]]:
    """Return the separators of lists, the loosest first; in ``1, 2 or 3`` comma and "or" are equivalent."""
    _, found = _split(tokens, (*_LISTED, *CONNECTIVES))
    if found and found[-1] in CONNECTIVES and not set(CONNECTIVES) & set(found[:-1]):
        return [(*_LISTED, *CONNECTIVES)]
    return [("or",), ("and",), _LISTED]


def _read_named(sides: Sequence[Sequence[str]], relations: Sequence[str], depth: int) -> Tree | None:
    """Return the value of equations that name or compute it, such as ``A = 3r = 6`` and ``2 + 3 = 5``."""
    if not set(relations) <= {"=", r"\in", r"\approx"}:
        return None
    texts = [normal_form(side) for side in sides]
    names = [text for text in texts[:-1] if _NAME.fullmatch(text)]
    if not names and len(texts) == 2 and _NAME.fullmatch(texts[1]):
        return Tree("named", texts[1], (_read(sides[0], depth + 1),))
    if texts[:1] != names[:1] and any(map(_LETTER.search, texts)):
        return None
    return Tree("named", "=".join(names or texts[:1]), (_read(sides[-1], depth + 1),))


def _list(kind: str, parts: tuple[Tree, ...]) -> Tree:
    """Build a list of values; ``x = 1, x = 2`` is one name with two values."""
    if all(part.kind == "named" for part in parts) and len({part.text for part in parts}) == 1:
        return Tree("named", parts[0].text, (Tree("or", "", tuple(part.parts[0] for part in parts)),))
    return Tree(kind, "", parts)


def _read_enclosed(tokens: Sequence[str], depth: int) -> Tree | None:
    """Return the content of brackets or an environment that enclose all tokens; None without them."""
    if len(tokens) < 2 or not _closes_at_end(tokens):
        return None
    opening, *inside, closing = tokens
    if opening.startswith(r"\begin"):
        return _read_environment(opening, inside, depth)
    pieces, _ = _split(inside, _LISTED)
    parts = tuple(_read(piece, depth + 1) for piece in pieces)
    if len(parts) > 1 or opening == r"\{":
        return Tree("list" if opening == "{" else f"{opening} {closing}", "", parts if inside else ())
    return parts[0] if _CLOSING[opening] == closing and (opening != "[" or parts[0].kind == "matrix") else None


def _read_environment(name: str, inside: Sequence[str], depth: int) -> Tree | None:
    """Return the entries of a matrix, or the lines of an equation of several lines."""
    if not name.endswith(("matrix}", "array}")):
        lines, _ = _split([token for token in inside if token != "&"], (ROW_BREAK,))
        return _list("list", tuple(_read(line, depth + 1) for line in lines if line))
    rows = [_split(row, ("&",))[0] for row in _split(inside, (ROW_BREAK,))[0] if stripped(row)]
    parts = tuple(Tree("row", "", tuple(_as_equation(_read(cell, depth + 1)) for cell in row)) for row in rows)
    return Tree("determinant" if "vmatrix" in name.lower() else "matrix", "", parts)


def _read_value(tokens: Sequence[str]) -> Tree:
    value, unit = split_unit(tokens)
    text = normal_form(value)
    if text == r"\mathbb{R}":
        return Tree("( )", "", (Tree("value", r"-\infty"), Tree("value", r"\infty")))
    return Tree(_SET) if text == r"\emptyset" else Tree("value", text, unit=unit)


def _nesting(token: str) -> int:
    """Return 1 for an opening bracket, -1 for a closing one, 0 for all else."""
    opens = token in _CLOSING or token.startswith(r"\begin{")
    return opens - (token in _CLOSING.values() or token.startswith(r"\end{"))


def _closes_at_end(tokens: Sequence[str]) -> bool:
    """Return whether the first bracket is open until the last token."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += _nesting(token)
        if depth <= 0:
            return i > 0 and i == len(tokens) - 1
    return False


def _split(tokens: Sequence[str], separators: Collection[str]) -> tuple[list[Sequence[str]], list[str]]:
    """Split at separators outside of brackets and environments; return the pieces and the separators between them."""
    depth = 0
    start = 0
    pieces = []
    found = []
    for i, token in enumerate(tokens):
        depth += _nesting(token)
        if depth == 0 and token in separators:
            pieces.append(stripped(tokens[start:i]))
            found.append(token)
            start = i + 1
    return [*pieces, stripped(tokens[start:])], found


# ---- comparing


def _same(one: Tree, other: Tree, judge: Judge) -> bool:
    states = [tree.kind in ("named", "relation") for tree in (one, other)]
    if all(states) and (one.kind, one.text) != (other.kind, other.text):
        return _same_relations(_as_equation(one), _as_equation(other), judge)
    if "named" in (one.kind, other.kind):
        one, other = (tree.parts[0] if tree.kind == "named" else tree for tree in (one, other))
        return _same(one, other, judge)
    if one.kind == other.kind == "relation":
        return _same_relations(one, other, judge)
    if one.kind == other.kind == "value":
        return not one.unit.differs(other.unit) and judge.values(one.text, other.text)
    for alone, value in ((one, other), (other, one)):
        if alone.kind == _SET and len(alone.parts) == 1 and value.kind == "value" and not _LETTER.search(value.text):
            return _same(alone.parts[0], value, judge)
    if one.kind in _INTERVALS or other.kind in _INTERVALS:
        one = _as_interval(one)
        other = _as_interval(other)
    if len(one.parts) != len(other.parts) or not _are_alike(one.kind, other.kind):
        return False
    if {one.kind, other.kind} == set(CONNECTIVES) and any(part.kind == "relation" for part in one.parts):
        return False
    if one.kind in _UNORDERED or other.kind in _UNORDERED or all(map(_states, (*one.parts, *other.parts))):
        return _same_sets(one.parts, other.parts, judge)
    return all(_same(a, b, judge) for a, b in zip(one.parts, other.parts, strict=True))


def _are_alike(kind: str, other: str) -> bool:
    return kind == other or {kind, other} <= {"list", *CONNECTIVES, _SET}


def _states(part: Tree) -> bool:
    """Whether a part of an answer is a statement, such as ``x = 2`` or ``x > 1``: these have no order."""
    return part.kind in ("named", "relation")


def _as_equation(tree: Tree) -> Tree:
    return Tree("relation", "=", (Tree("value", tree.text), *tree.parts)) if tree.kind == "named" else tree


def _as_interval(tree: Tree) -> Tree:
    """Return the interval of ``x > 3`` or ``1 < x < 3``, and the union of such with ``or`` between them."""
    if tree.kind == "or" and all(part.kind == "relation" for part in tree.parts):
        return Tree("union", "", tuple(_as_interval(part) for part in tree.parts))
    if tree.kind != "relation":
        return tree
    signs = tree.text.split()
    parts = tree.parts
    if set(signs) <= {">", r"\ge"}:
        signs = _turned(signs)
        parts = parts[::-1]
    if not set(signs) <= {"<", r"\le"}:
        return tree
    brackets = [{"<": ("(", ")"), r"\le": ("[", "]")}[sign] for sign in signs]
    names = [bool(_NAME.fullmatch(part.text)) and part.kind == "value" for part in parts]
    if names == [False, True, False]:
        return Tree(f"{brackets[0][0]} {brackets[1][1]}", "", (parts[0], parts[2]))
    if names == [True, False]:
        return Tree(f"( {brackets[0][1]}", "", (Tree("value", r"-\infty"), parts[1]))
    if names == [False, True]:
        return Tree(f"{brackets[0][0]} )", "", (parts[0], Tree("value", r"\infty")))
    return tree


def _turned(relations: Sequence[str]) -> list[str]:
    return [_TURNED.get(each, each) for each in reversed(relations)]


def _same_relations(one: Tree, other: Tree, judge: Judge) -> bool:
    """Compare relations side by side, also reversed; compare equations also with all terms moved to one side."""
    readings = [(other.text, other.parts), (" ".join(_turned(other.text.split())), other.parts[::-1])]
    if any(
        one.text == relations and all(_same(a, b, judge) for a, b in zip(one.parts, parts, strict=True))
        for relations, parts in readings
    ):
        return True
    if not (one.text == other.text == "=" and all(part.kind == "value" for part in (*one.parts, *other.parts))):
        return False
    differences = [f"{left.text}-({right.text})" for left, right in (one.parts, other.parts)]
    return all(map(_LETTER.search, differences)) and judge.equations(*differences)


def _same_sets(one: Sequence[Tree], other: Sequence[Tree], judge: Judge) -> bool:
    if len(one) > MOST_PARTS:
        return list(one) == list(other)
    left = list(other)
    for part in one:
        match = next((each for each in left if _same(part, each, judge)), None)
        if match is None:
            return False
        left.remove(match)
    return True
