r"""The parts of a mathematical answer in LaTeX, and whether two answers have the same parts.

An answer is read as a tree of lists, sets, intervals, unions, matrices and relations, down to single values. Two
answers are the same if their trees are. ``same_values`` compares values as texts and as rational numbers; a caller that
knows algebra passes a judge of its own.

A name (``x =``) or a unit (``\text{ cm}``) that only one of two answers writes does not count. If both write one, both
must write the same.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

LONGEST_CHARS = 2000
MOST_DIGITS = 1000
DEEPEST = 50  # brackets inside brackets
MOST_PARTS = 200  # of a set, whose parts are compared with each other

_UNICODE = {
    **{"\u2212": "-", "\u2013": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "√": r"\sqrt "},
    **{"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∞": r"\infty ", "°": r"^\circ ", "²": "^2"},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "³": "^3"},
    **{
        "ℝ": r"\mathbb{R}",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    },
}
_TRANSLATION = str.maketrans(_UNICODE)
_COMMANDS = {
    **dict.fromkeys(("tfrac", "dfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl"), ""),
    **dict.fromkeys(("bigg", "Bigg", "Biggr", "displaystyle", "textstyle", "limits", "degree"), ""),
    **{"quad": " ", "qquad": " ", "geq": r"\ge ", "leq": r"\le ", "neq": r"\ne ", "lt": "<", "gt": ">"},
    **{"lbrace": r"\{", "rbrace": r"\}", "lvert": "|", "rvert": "|", "vert": "|"},
}
_COMMAND = re.compile(r"(?<!\\)\\(" + "|".join(_COMMANDS) + r")(?![a-zA-Z])\s*")
_TEXT_COMMAND = r"\\(?:text|mbox|textrm|mathrm)\s*\{"
_WRITTEN_TWICE = re.compile(r"\\\\(?=[a-zA-Z{}$%!,;:])")  # escaped again, as in JSON
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF](?![a-zA-Z]))?")
_CURRENCY = re.compile(r"\\text\{\\\$\}|\\?\$|[€£]")
_MEASURES = {
    "dollar": re.compile(r"\\\$|(?<![a-zA-Z])dollars?(?![a-zA-Z])"),
    "cent": re.compile(r"(?<![a-zA-Z])cents?(?![a-zA-Z])"),
    "euro": re.compile("€"),
    "pound": re.compile("£"),
    "percent": re.compile(r"%|(?<![a-zA-Z])percent(?![a-zA-Z])"),
    "fahrenheit": re.compile(r"(?:\\circ\s*\}?|°)\s*(?:\\(?:text|mathrm)\s*\{\s*)?F(?![a-zA-Z])"),
    "degree": re.compile(r"(?:\\circ\s*\}?|°|\\degree|℃)(?!\s*(?:\\(?:text|mathrm)\s*\{\s*)?F(?![a-zA-Z]))"),
}
"""Signs of what a number measures, which do not count if only one of two answers has them."""
_LONG_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?)")  # the sign has no braces, and means the whole number
_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}")
_ALL_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R")
_SPACE = re.compile(r"(?<!\\)\\[!,;: ]|~|\s+")
_GROUP = r"(?:\{,\}|,\\!|(?<!\\)\\[,! ]|~| )"  # between the digits of a large number
_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)")
_BETWEEN = re.compile(_GROUP)
_OR, _AND = "\\or ", "\\and "
_CONNECTIVE = re.compile(rf",?\s*(?:{_TEXT_COMMAND}\s*(and|or)\s*\}}|(?<=[\s\d}})])(and|or)(?=[\s\\\d({{]))\s*")
_WRAPPED = re.compile(r"\\(?:text|mbox|textrm|mathrm|textbf|mathbf|mathit|textit|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(rf"^(.*[\w}}).!])\s*{_TEXT_COMMAND}([^{{}}]*)\}}(\^\{{?\d\}}?)?$", re.DOTALL)
_SHORT_UNITS = (
    "cm mm km nm dm kg mg lb lbs oz mi ft yd yds hr hrs min mins sec secs ms ml mL cc gal pt qt sq cu cubic square mph "
    "kph rpm Hz kHz kW kJ in inch feet foot day days year years unit units hour hours mile miles edge edges cent cents"
).split()
_PLAIN_UNIT = re.compile(
    rf"^([+-]?[\d.,/]+)(?:\s*((?:{'|'.join(_SHORT_UNITS)})\.?(?:\s+[a-zA-Z]+\.?)*)|\s+((?!sqrt)[a-zA-Z]{{3,}}\.?(?:\s+"
    rf"[a-zA-Z]+\.?)*)|\s*([a-zA-Z]{{5,}}\.?))(\^\{{?\d\}}?)?$"
)
"""A unit without a text command; letters after a number without a blank may be a product."""
_NO_UNIT = re.compile(
    r"(?<![a-zA-Z])(?:tens?|dozens?|scores?|pairs?|hundreds?|thousands?|millions?|billions?|trillions?|or|and|more|less"
    r"|fewer|plus|minus|times|over|mod|modulo|choose|to|than|not|least|most|about|remainder|squared|cubed|factorial|root"
    r"|half|halves|thirds?|quarters?|is|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![a-zA-Z])"
)
"""Words that change a number."""
_WORDS = re.compile(r"(?:[A-Z]?[a-z]{2,}+)++|No")
_MATRIX = re.compile(r"^\\begin\{(\w*matrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}$", re.DOTALL)
_ROW_BREAK = re.compile(r"\\\\(?:\[\w*\])?")
_ARGUMENT = r"\s*(\{[^{}]*\}|\\[a-zA-Z]+|[0-9a-zA-Z])"
_FRACTION_ARGUMENTS = re.compile(r"(\\frac|\\binom)" + _ARGUMENT + _ARGUMENT)
_BARE_ARGUMENT = re.compile(r"(\\sqrt|[\^_])\s*([0-9a-zA-Z])")
_NAME = re.compile(
    r"^([a-zA-Z](?:_\{?\w{1,3}\}?)?(?:\(\w{1,3}\))?|[A-Z]{2,3}|m?\s*\\angle\s*[A-Z]{1,3}|\\[a-z]*(?:alpha|beta|gamma|theta|phi))\s*(?:=|\\in(?![a-zA-Z]))(.*)$",
    re.DOTALL,
)
_SIGNED = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_INVERSE = re.compile(r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?")
_RELATIONS = (r"\le", r"\ge", r"\ne", "<", ">", "=")
_VARIABLE = re.compile(r"\s*(?:[a-zA-Z]|\\(?:theta|alpha|beta))\s*$")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_GROUP_OF_ZEROS = re.compile(r"\d,0\d\d(?!\d)")
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}"}
_SET = r"\{ \}"
_INTERVALS = ("( )", "( ]", "[ )", "[ ]", "union")
_UNORDERED = (_SET, "or", "and", "union")

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_NUMBER = re.compile(rf"^[+-]?{_DECIMAL}(?:[eE][+-]?\d{{1,3}})?$")
_LATEX_RATIO = re.compile(r"^([+-]?)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}$")
_MIXED = re.compile(r"^([+-]?)(\d+)(?:\\frac\{(\d+)\}\{(\d+)\}|\s(\d+)/(\d+))$")
_REPEATING = re.compile(r"^([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}$")
_PLAIN_RATIO = re.compile(r"^([+-]?\d+)/([+-]?\d+)$")
THOUSANDS = re.compile(r"^[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?$")

Judge = Callable[[str, str], bool]
"""Decides whether two values are equal."""


class Tree(NamedTuple):
    """An answer: a value, or parts of one kind."""

    kind: str
    text: str = ""  # the value, the name, or the relations between the parts
    parts: "tuple[Tree, ...]" = ()


def same(one: str, other: str, judge: "Judge | None" = None) -> bool:
    """Return whether two answers have the same parts, whose values ``judge`` compares; by default ``same_values``.

    Longer answers than ``LONGEST_CHARS`` are compared as texts.
    """
    if max(len(one), len(other)) > LONGEST_CHARS:
        return one.strip() == other.strip()
    if measure_differently(one, other):
        return False
    return _same(_read(cleaned(one)), _read(cleaned(other)), judge or same_values)


def measure_differently(one: str, other: str) -> bool:
    """Return whether both answers have signs such as those of dollars, percent or degrees, and others."""
    signs = [{name for name, sign in _MEASURES.items() if sign.search(text)} for text in (one, other)]
    return bool(signs[0] and signs[1] and signs[0] != signs[1])


def cleaned(text: str) -> str:
    """Return an answer in plain LaTeX, without sizes, currency, percent, degrees and LaTeX's thousands separators."""
    text = _LONG_ROOT.sub(r"\\sqrt{\1}", text).replace("℃", "")
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).replace("\u2044", "/").strip()
    if r"\\begin{" in text:
        text = text.replace("\\\\", "\\")
    elif r"\begin{" not in text:
        text = _WRITTEN_TWICE.sub(lambda match: "\\", text)
    text = _COMMAND.sub(lambda match: _COMMANDS[match[1]], text)
    text = _DEGREES.sub("", text)
    text = _INVERSE.sub(r"\\arc\1 ", text)
    text = _EMPTY_SET.sub(r"\\emptyset ", text)
    text = _CURRENCY.sub("", text).replace(r"\%", "").replace("%", "")
    text = _GROUPED.sub(lambda match: _BETWEEN.sub("", match[0]), text)
    text = _CONNECTIVE.sub(lambda match: _AND if "and" in match.groups() else _OR, text)
    text = _SPACE.sub(" ", text).strip()
    return re.sub(r"(?<!\\)[.,;:]+$", "", text.rstrip("\\ ")).strip()


def same_values(one: str, other: str) -> bool:
    """Return whether two values are the same text or the same rational number."""
    (value, unit), (other_value, other_unit) = with_unit(one), with_unit(other)
    if unit and other_unit and unit != other_unit:
        return False
    if value == other_value or _terms(value) == _terms(other_value):
        return bool(value)
    if value.lower() == other_value.lower() and _WORDS.fullmatch(value) and _WORDS.fullmatch(other_value):
        return True
    number = rational(value)
    return number is not None and number == rational(other_value)


def _terms(value: str) -> list[str]:
    """Return the terms of a sum with their signs, sorted."""
    terms, signs = _split(value, ("+", "-"))
    return sorted(sign + term for sign, term in zip(["+", *signs], terms, strict=True) if term)


def with_unit(text: str) -> tuple[str, str]:
    """Return a value in normal form, and its unit or an empty text."""
    text, unit = _split_unit(text)
    text = _WRAPPED.sub(lambda match: match[1], text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\0", text)  # the space that ends a command
    text = re.sub(r"(?<=\d)\s+(?=\d)", "\1", text)  # between two numbers
    text = re.sub(r"\s+", "", text).replace("\0", " ").replace("\1", " ").removeprefix("+")
    before = ""
    while text != before:  # until nested fractions all have braces
        before = text
        text = _FRACTION_ARGUMENTS.sub(lambda match: f"{match[1]}{_braced(match[2])}{_braced(match[3])}", text)
    text = _BARE_ARGUMENT.sub(r"\1{\2}", text)
    return (text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text), unit


def _split_unit(text: str) -> tuple[str, str]:
    match = _UNIT.match(text) or _PLAIN_UNIT.match(text)
    if match is None or _NO_UNIT.search(text, match.end(1)):
        return text, ""
    unit = "".join(filter(None, match.groups()[1:]))
    return match[1], re.sub(r"[\s.{}]", "", unit).lower().removesuffix("s")


def rational(text: str) -> Fraction | None:
    """Return a number in normal form exactly; None for anything else or too many digits."""
    if len(text) > MOST_DIGITS:
        return None
    if THOUSANDS.match(text):
        text = text.replace(",", "")
    try:
        if _NUMBER.match(text):
            return Fraction(text.replace(".e", "e").replace(".E", "E").rstrip("."))
        if ratio := _PLAIN_RATIO.match(text):
            return Fraction(int(ratio[1]), int(ratio[2]))
        if ratio := _LATEX_RATIO.match(text):
            return Fraction(int(ratio[2]), int(ratio[3])) * (-1 if ratio[1] == "-" else 1)
        if mixed := _MIXED.match(text):
            part = Fraction(int(mixed[3] or mixed[5]), int(mixed[4] or mixed[6]))
            return (int(mixed[2]) + part) * (-1 if mixed[1] == "-" else 1)
        if digits := _REPEATING.match(text):
            before = Fraction(f"{digits[2] or 0}.{digits[3] or 0}")
            period = Fraction(int(digits[4]), (10 ** len(digits[4]) - 1) * 10 ** len(digits[3]))
            return (before + period) * (-1 if digits[1] == "-" else 1)
    except ZeroDivisionError:
        pass
    return None


# ---- reading


def _read(text: str, depth: int = 0) -> Tree:
    text = text.strip()
    if depth > DEEPEST:
        return Tree("value", text)
    if whole := _WRAPPED.fullmatch(text):
        return _read(whole[1], depth + 1)
    if matrix := _MATRIX.match(text):
        rows = [row for row in _ROW_BREAK.split(matrix[2].strip()) if row.strip()]
        cells = tuple(Tree("row", "", tuple(_read(cell, depth + 1) for cell in row.split("&"))) for row in rows)
        return Tree("determinant" if matrix[1] in ("vmatrix", "Vmatrix") else "matrix", "", cells)
    if _ALL_REALS.fullmatch(text):
        text = r"(-\infty,\infty)"
    if text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        return _read(text[1:-1], depth + 1)
    for kind, separators in (("or", (_OR.strip(),)), ("and", (_AND.strip(),)), ("list", (",", ";"))):
        pieces, _ = _split(text, separators)
        if len(pieces) > 1 and not THOUSANDS.match(_split_unit(text)[0].strip()):
            return _list(kind, tuple(_read(piece, depth + 1) for piece in pieces))
    if name := _NAME.match(text):
        return Tree("named", with_unit(name[1])[0], (_read(name[2], depth + 1),))
    pieces, relations = _split(text, _RELATIONS)
    if len(pieces) > 1:
        return Tree("relation", " ".join(relations), tuple(_read(piece, depth + 1) for piece in pieces))
    pieces, _ = _split(text, (r"\cup",))
    if len(pieces) > 1:
        return Tree("union", "", tuple(_read(piece, depth + 1) for piece in pieces))
    if _SIGNED.search(text):
        upper, lower = (text.replace(r"\pm", one).replace(r"\mp", other) for one, other in ("+-", "-+"))
        return Tree("or", "", (_read(upper, depth + 1), _read(lower, depth + 1)))
    return _read_brackets(text, depth) or Tree("value", text)


def _list(kind: str, parts: tuple[Tree, ...]) -> Tree:
    """Return a list; ``x = 1, x = 2`` is one name with two values."""
    if all(part.kind == "named" for part in parts) and len({part.text for part in parts}) == 1:
        return Tree("named", parts[0].text, (Tree("or", "", tuple(part.parts[0] for part in parts)),))
    return Tree(kind, "", parts)


def _read_brackets(text: str, depth: int) -> Tree | None:
    """Return what stands in the brackets around the whole text; None without them."""
    opening = next((each for each in _CLOSING if text.startswith(each)), None)
    closing = next((each for each in _CLOSING.values() if text.endswith(each)), None)
    if opening is None or closing is None or not _closes_at_end(text):
        return None
    pieces, _ = _split(text[len(opening) : len(text) - len(closing)], (",", ";"))
    parts = tuple(_read(piece, depth + 1) for piece in pieces)
    if len(parts) == 1 and opening == "(":
        return parts[0] if closing == ")" else None
    return Tree(f"{opening} {closing}", "", parts)


def _closes_at_end(text: str) -> bool:
    """Return whether the first bracket is open until the last character."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return i == len(text) - 1
    return False


def _split(text: str, separators: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at separators outside of brackets and environments; return the pieces and the separators between them."""
    pieces: list[str] = []
    found: list[str] = []
    depth = start = i = 0
    while i < len(text):
        character = text[i]
        depth += (character in "([{") - (character in ")]}")
        if character == "," and _GROUP_OF_ZEROS.match(text, i - 1):  # 1,000 is one number, wherever it stands
            i += 1
            continue
        depth += text.startswith(r"\begin", i) - text.startswith(r"\end", i)
        separator = next((each for each in separators if depth == 0 and text.startswith(each, i)), None)
        if separator is not None and separator.startswith("\\") and text[i + len(separator) :][:1].isalpha():
            separator = None  # a longer command
        if separator is None:
            i += 1
            continue
        pieces.append(text[start:i])
        found.append(separator)
        i = start = i + len(separator)
    return [*pieces, text[start:]], found


# ---- comparing


def _same(one: Tree, other: Tree, judge: Judge) -> bool:
    if one.kind == "named" and other.kind == "named":
        if one.text == other.text:
            return _same(one.parts[0], other.parts[0], judge)
        return _same_relations(_as_equation(one), _as_equation(other), judge)
    for named, plain in ((one, other), (other, one)):
        if named.kind == "named" and plain.kind == "relation":
            return _same(_as_equation(named), plain, judge)
        if named.kind == "named":
            return _same(named.parts[0], plain, judge)
    if one.kind in _INTERVALS and other.kind not in _INTERVALS:
        other = _as_interval(other)
    elif other.kind in _INTERVALS and one.kind not in _INTERVALS:
        one = _as_interval(one)
    if one.kind == other.kind == "value":
        return judge(one.text, other.text)
    if one.kind == other.kind == "relation":
        return _same_relations(one, other, judge)
    if len(one.parts) != len(other.parts) or not _are_alike(one.kind, other.kind):
        return False
    if {one.kind, other.kind} == {"and", "or"} and any(part.kind == "relation" for part in one.parts):
        return False
    if one.kind in _UNORDERED or other.kind in _UNORDERED or all(map(_states, (*one.parts, *other.parts))):
        return _same_sets(one.parts, other.parts, judge)
    return all(_same(a, b, judge) for a, b in zip(one.parts, other.parts, strict=True))


def _are_alike(kind: str, other: str) -> bool:
    return kind == other or {kind, other} <= {"list", "or", "and", _SET}


def _states(part: Tree) -> bool:
    """Whether a part of an answer is a statement, such as ``x = 2`` or ``x > 1``: these have no order."""
    return part.kind in ("named", "relation")


def _as_equation(named: Tree) -> Tree:
    return Tree("relation", "=", (Tree("value", named.text), *named.parts))


def _as_interval(tree: Tree) -> Tree:
    """Return the interval of ``x > 3`` or ``1 < x < 3``, and the union of such with ``or`` between them."""
    if tree.kind == "or" and all(part.kind == "relation" for part in tree.parts):
        return Tree("union", "", tuple(_as_interval(part) for part in tree.parts))
    signs = tree.text.split()
    if tree.kind != "relation" or len({sign in (">", r"\ge") for sign in signs}) > 1 or {"=", r"\ne"} & set(signs):
        return tree
    parts = tree.parts
    if signs[0] in (">", r"\ge"):
        signs, parts = [_TURNED[sign] for sign in reversed(signs)], parts[::-1]
    names = [bool(_VARIABLE.match(part.text)) and part.kind == "value" for part in parts]
    brackets = [{"<": ("(", ")"), r"\le": ("[", "]")}[sign] for sign in signs]
    if names == [False, True, False]:
        return Tree(f"{brackets[0][0]} {brackets[1][1]}", "", (parts[0], parts[2]))
    if names == [True, False]:
        return Tree(f"( {brackets[0][1]}", "", (Tree("value", r"-\infty"), parts[1]))
    if names == [False, True]:
        return Tree(f"{brackets[0][0]} )", "", (parts[0], Tree("value", r"\infty")))
    return tree


def _same_relations(one: Tree, other: Tree, judge: Judge) -> bool:
    turned = " ".join(_TURNED[each] for each in reversed(other.text.split()))
    readings = [(other.text, other.parts), (turned, other.parts[::-1])]
    if one.text == other.text == "=" and all(part.kind == "value" for part in (*one.parts, *other.parts)):
        left, *moved = [f"{a.text}-({b.text})" for a, b in (one.parts, other.parts, other.parts[::-1])]
        if any(judge(left, right) for right in moved):
            return True
    return any(
        one.text == relations and all(_same(a, b, judge) for a, b in zip(one.parts, parts, strict=True))
        for relations, parts in readings
    )


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


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else "{" + argument + "}"
