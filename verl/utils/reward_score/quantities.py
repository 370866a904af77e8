"""The number and the unit of an answer."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from verl.utils.reward_score.latex_tokens import DEGREES, is_text, normal_form, stripped

MOST_DIGITS = 1000

_SIGNS = {r"\$": "dollar", "€": "euro", "£": "£", "%": "percent", DEGREES: "degree"}
"""Signs of units. Some have names that are written as units."""
_MEASURES = (*_SIGNS.values(), "cent")
_SHORT_UNITS = (
    "cm mm km nm dm kg mg lb lbs oz mi ft yd yds hr hrs min mins sec secs ms ml mL cc gal pt qt sq cu mph kph rpm Hz "
    "kHz kW kJ in inch feet foot day days year unit hour mile edge cent men am pm USD"
).split()
_ABBREVIATIONS = {
    **{
        "inch": "in",
        "inches": "in",
        "foot": "ft",
        "feet": "ft",
        "yard": "yd",
        "mile": "mi",
        "meter": "m",
        "metre": "m",
    },
    **{"millimeter": "mm", "centimeter": "cm", "kilometer": "km", "liter": "l", "gram": "g", "kilogram": "kg"},
    **{"pound": "lb", "ounce": "oz", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "year": "yr"},
    **{"per": "/", "mph": "mi/h", "kph": "km/h", "deg": "degree", "usd": "dollar"},
}
_NUMERALS = frozenset(
    "ten dozen score pair hundred thousand million billion trillion half halve third quarter squared cubed factorial "
    "root plus minus time over mod modulo choose remainder more less fewer than to not least most about is sqrt e i d "
    "st nd rd th gon or and".split()
)
"""Words that change a number."""
_UNIT = re.compile(r"(?:(?:\\text\{[^{}]*\}|[a-zA-Z]++)(?:\^\{?-?\d\}?)?[\s./-]*+)++")
_TIME = re.compile(r"\d\d?:\d\d")

_LATEX_RATIO = re.compile(r"\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}$")
_RATIO = re.compile(r"([+-]?)(?:(\d+) )? ?([+-]?\d+)/([+-]?\d+)")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")


class Unit(NamedTuple):
    """The unit of a number: the names of signs such as ``%``, and words such as ``cm``."""

    signs: frozenset[str] = frozenset()
    words: str = ""

    def differs(self, other: "Unit") -> bool:
        """Return whether both are stated, and are not the same; a sign with words is the same as the sign."""
        stated = [(mine, others) for mine, others in zip(self, other, strict=True) if mine and others]
        return any(mine != others for mine, others in stated) if stated else any(self) and any(other)


def split_unit(tokens: Sequence[str]) -> tuple[Sequence[str], Unit]:
    """Return the tokens of a value without its unit, and the unit."""
    signs = frozenset(_SIGNS[token] for token in tokens if token in _SIGNS)
    tokens = stripped([token for token in tokens if token not in _SIGNS])
    for i in range(1, len(tokens)):
        words = "".join(tokens[i:])
        if not (tokens[i].isalpha() or is_text(tokens[i])) or not _UNIT.fullmatch(words):
            continue
        value = stripped(tokens[:i])
        if not _measures(value, tokens[i:], after_blank=tokens[i - 1] == " "):
            continue
        unit = _abbreviated(words)
        return value, Unit(signs | {unit}) if unit in _MEASURES else Unit(signs, unit)
    return tokens, Unit(signs)


def _measures(value: Sequence[str], words: Sequence[str], after_blank: bool) -> bool:
    r"""Return whether words are the unit of a value: in ``\text{...}`` all are that do not change a number.

    Without that command a unit is a known one after a blank, or follows a number. Letters that follow a number without
    a blank may be a product of variables.
    """
    if _NUMERALS & set(_singular(re.findall("[a-z]+", "".join(words).replace(r"\text", "").lower()))):
        return False
    if is_text(words[0]):
        return True
    is_known = words[0] in _SHORT_UNITS
    if is_known and after_blank:
        return True
    number = normal_form(value)
    is_number = rational(number) is not None or bool(_TIME.fullmatch(number))
    return is_number and (is_known or len(words[0]) >= (4 if after_blank else 5))


def _abbreviated(words: str) -> str:
    r"""Return one spelling of a unit: ``ft^2`` for ``\text{ square feet}``."""
    text = re.sub(r"\\text|[{}.]", "", words).lower()
    text = re.sub(r"\b(?:square|sq)\s+([a-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu)\s+([a-z]+)", r"\1^3", text)
    names = _singular(re.findall(r"[a-z]+|[^a-z\s]+", text))
    return "".join(_ABBREVIATIONS.get(name, name) for name in names)


def _singular(words: Sequence[str]) -> list[str]:
    return [word.removesuffix("s") if len(word) > 2 and word not in _ABBREVIATIONS else word for word in words]


def rational(text: str) -> Fraction | None:
    """Return a number in normal form exactly; None for anything else or too many digits."""
    if len(text) > MOST_DIGITS:
        return None
    text = _LATEX_RATIO.sub(r" \1/\2", text)
    try:
        if _DECIMAL.fullmatch(text):
            return Fraction(text.replace(".e", "e").replace(".E", "E").rstrip("."))
        if ratio := _RATIO.fullmatch(text):
            number = int(ratio[2] or 0) + Fraction(int(ratio[3]), int(ratio[4]))
            return -number if ratio[1] == "-" else number
        if digits := _REPEATING.fullmatch(text):
            before = Fraction(f"{digits[2] or 0}.{digits[3] or 0}")
            period = Fraction(int(digits[4]), (10 ** len(digits[4]) - 1) * 10 ** len(digits[3]))
            return -(before + period) if digits[1] == "-" else before + period
    except ZeroDivisionError:
        pass
    return None
