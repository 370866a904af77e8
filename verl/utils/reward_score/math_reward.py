r"""Score MATH: compare the content of the last ``\boxed`` with the ground truth as mathematics.

Two answers are equivalent if their normal forms are the same text or the same rational number, or if they are tuples,
sets or intervals of equivalent parts in the same brackets.
"""

import re
from fractions import Fraction

BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
BARE = re.compile(r"[^\s$]+")
BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}

MOST_DIGITS = 1000

_SPACING = re.compile(r"\\[!,;: ]|\\(?:quad|qquad|displaystyle|limits)(?![a-zA-Z])|~|\s+")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?")
_UNIT_OR_TEXT = re.compile(r"\\(?:text|mbox|textrm|mathrm|textbf|mathbf)\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")
_ARGUMENT = r"(\{[^{}]*\}|\\[a-zA-Z]+|[0-9a-zA-Z])"
_FRACTION_ARGUMENTS = re.compile(r"\\frac" + _ARGUMENT + _ARGUMENT)
_SQRT_ARGUMENT = re.compile(r"\\sqrt([0-9a-zA-Z])")
_LATEX_RATIO = re.compile(r"^(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}$")
_MIXED = re.compile(r"^(-?)(\d+)\\frac\{(\d+)\}\{(\d+)\}$")
_NUMBER = re.compile(r"^-?(?:\d+\.?\d*|\.\d+)$")
_PLAIN_RATIO = re.compile(r"^(-?\d+)/(-?\d+)$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")


def compute_score(solution_str: str, ground_truth: str) -> float:
    r"""Return 1 if the last boxed answer is equivalent to the ground truth, else 0."""
    boxed = last_boxed_only_string(solution_str)
    return float(boxed is not None and is_equiv(remove_boxed(boxed), str(ground_truth)))


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (or ``\fbox``, or ``\boxed x``) with its braces balanced; None without one."""
    closing: dict[int, int] | None = None
    for match in reversed(list(BOXED.finditer(string))):
        start = match.end()
        if start < len(string) and string[start] == "{":
            closing = _closing_braces(string) if closing is None else closing
            end = closing.get(start)
            if end is not None:
                return string[match.start() : end + 1]
        elif bare := BARE.match(string, start):
            return string[match.start() : bare.end()]
    return None


def remove_boxed(string: str) -> str:
    r"""Return the content of a ``\boxed{...}``.

    Raises: ValueError if the text does not start with one.
    """
    match = BOXED.match(string)
    if match is None:
        raise ValueError(f"no boxed answer in {string!r}")
    content = string[match.end() :]
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Return whether two answers are equivalent."""
    if str1 is None or str2 is None:
        return str1 is str2
    return _same(normalize(str1), normalize(str2))


def normalize(string: str) -> str:
    """Normalise an answer: drop spacing, sizing, units, currency, percent and degree signs."""
    text = string.strip().replace("\n", "")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("cfrac", "frac")
    text = _SIZING.sub("", text.replace("\\\\", "\\"))
    text = _DEGREES.sub("", text)
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    if not text.lstrip().startswith("\\text"):
        text = re.sub(r"\\(?:text|mbox|mathrm|textrm)\{\s[^{}]*\}$", "", text)  # a unit behind the number
    text = _UNIT_OR_TEXT.sub(lambda match: match[1].strip(), text)
    text = _SPACING.sub("", text).rstrip(".")
    if "=" in text and len(text.split("=")) == 2 and len(text.split("=")[0]) <= 2:
        text = text.split("=")[1]
    before = ""
    while text != before:  # until nested fractions all have braces
        before = text
        text = _FRACTION_ARGUMENTS.sub(lambda m: f"\\frac{_braced(m[1])}{_braced(m[2])}", text)
    return _SQRT_ARGUMENT.sub(r"\\sqrt{\1}", text)


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    value = _rational(one)
    if value is not None:
        return value == _rational(other)
    parts = split_answer(one)
    other_parts = split_answer(other)
    if parts is None or other_parts is None or len(parts) != len(other_parts):
        return False
    return all(_same(a, b) for a, b in zip(parts, other_parts, strict=True))


def _rational(text: str) -> Fraction | None:
    """Parse an integer, a decimal or a ratio of integers exactly; None for anything else or too many digits."""
    text = _THOUSANDS.sub("", text).replace("{,}", "")
    if len(text) > MOST_DIGITS:
        return None
    try:
        if _NUMBER.match(text):
            return Fraction(text.rstrip("."))
        if ratio := _PLAIN_RATIO.match(text):
            return Fraction(int(ratio[1]), int(ratio[2]))
        if ratio := _LATEX_RATIO.match(text):
            return Fraction(int(ratio[2]), int(ratio[3])) * (-1 if ratio[1] else 1)
        if mixed := _MIXED.match(text):
            return (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))) * (-1 if mixed[1] else 1)
    except ZeroDivisionError:
        pass
    return None


def split_answer(text: str) -> list[str] | None:
    """Split a bracketed or bare list at its outer commas; brackets become parts too. None if it is not a list."""
    for opening in BRACKETS:
        closings = [closing for closing in (")", "]", r"\}") if text.endswith(closing)]
        if text.startswith(opening) and closings:
            inner = _split(text[len(opening) : len(text) - len(closings[0])])
            return [opening, *inner, closings[0]] if len(inner) > 1 else None
    bare = _split(text)
    return bare if len(bare) > 1 else None


def _split(text: str) -> list[str]:
    parts = []
    depth = 0
    start = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _closing_braces(string: str) -> dict[int, int]:
    """Return the position of each opening brace -> that of its closing one, in one pass over a long response."""
    open_braces: list[int] = []
    closing: dict[int, int] = {}
    for i, character in enumerate(string):
        if character == "{":
            open_braces.append(i)
        elif character == "}" and open_braces:
            closing[open_braces.pop()] = i
    return closing


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else "{" + argument + "}"
