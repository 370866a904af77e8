r"""The tokens of an answer in LaTeX, and the text that they write in normal form.

A token is a number, a run of letters, a command, an environment (``\begin{pmatrix}``), words (``\text{ cm}``), a row
break, a blank or one other character. Sizes of brackets are dropped, and synonyms have one spelling.
"""

import re
import unicodedata
from collections.abc import Sequence

ROW_BREAK = r"\\"
DEGREES = "°"
CONNECTIVES = ("and", "or")
GREEK = "alpha beta gamma delta epsilon theta lambda mu pi rho sigma tau phi psi omega".split()

_TRANSLATION = str.maketrans(
    {
        **{letter: rf"\{name} " for letter, name in zip("αβγδεθλμπρστφψω", GREEK, strict=True)},
        **{
            "−": "-",
            "–": "-",
            "⁻": "-",
            "×": r"\times ",
            "÷": r"\div ",
            "·": r"\cdot ",
            "⋅": r"\cdot ",
            "√": r"\sqrt ",
        },
        **{"∞": r"\infty ", "°": r"^\circ ", "℃": r"^\circ C", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "\u2044": "/"},
        **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    }
)
_REWRITTEN = [
    (re.compile(r"√\s*(\d+(?:\.\d+)?)"), r"\\sqrt{\1}"),  # the sign has no braces, and means the whole number
    (re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+)"), r"^{\1}"),
    (re.compile("([₀₁₂₃₄₅₆₇₈₉]+)"), r"_{\1}"),
    (re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?"), r"\\arc\1 "),
    (re.compile(r"(?<![a-zA-Z])([ap])\.\s?m\."), r"\1m"),  # a time of day
]
_ESCAPED_TWICE = re.compile(r"\\\\(?=[a-zA-Z{}$%!,;:])")  # as in JSON

_GAP = r"(?:\{,\}|,\\!|\\[,! ]|~|[ ])"  # between the digits of a large number
_TOKEN = re.compile(
    rf"""
      (?P<environment>\\(?:begin|end)\{{\w+\}})(?:\{{[lcr|\s]*\}})?
    | (?P<row>\\\\(?:\[\w*\])?)
    | (?P<degrees>\^\s*\{{?\s*\\circ\s*\}}?(?:\s*C(?![a-zA-Z]))?|\\degree(?![a-zA-Z]))
    | (?P<size>\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z]))
    | \\(?:text|mbox|textrm|mathrm)\s*\{{(?P<words>[^{{}}]*)\}}
    | \\(?:textbf|mathbf|textit|mathit|operatorname|underline|emph)\s*\{{(?P<styled>[^{{}}]*)\}}
    | (?P<number>
          (?<![\d.])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?!\d)(?:\.\d+)?
        | (?<![\d.,])[1-9]\d{{0,2}}(?:,\d{{3}})+(?!,?\d)(?:\.\d+)?
        | (?<![\d.])[1-9]\d{{0,2}}(?:,0\d\d)+(?!\d)
        | \d+(?:\.\d+)? | \.\d+ )
    | (?P<blank>\s+|\\[,!;: ]|~|\\q?quad(?![a-zA-Z]))
    | \\[a-zA-Z]+ | \\. | [a-zA-Z]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)
_SYNONYMS = {
    **{r"\tfrac": r"\frac", r"\dfrac": r"\frac", r"\cfrac": r"\frac", r"\varnothing": r"\emptyset", r"\%": "%"},
    **{r"\geq": r"\ge", r"\leq": r"\le", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">", r"\R": r"\mathbb{R}"},
    **{r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")"},
    **{r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\cr": ROW_BREAK, "$": "", '"': ""},
}

_ARGUMENT = r"\s*(\{[^{}]*\}|\\[a-zA-Z]+|[0-9a-zA-Z])"
_FRACTION = re.compile(r"(\\frac|\\binom)" + _ARGUMENT + _ARGUMENT)
_BARE_ARGUMENT = re.compile(r"(\\sqrt|\\pmod|[\^_])\s*([0-9a-zA-Z])")


def tokenize(text: str) -> list[str]:
    """Return the tokens of an answer."""
    found: list[str] = []
    depth = 0  # depth of brackets: (1,234) is a pair, (1,000) a number
    for match in _TOKEN.finditer(_in_plain_latex(text)):
        kind = match.lastgroup
        token = match[0]
        if kind == "environment":
            found.append(match[kind])
        elif kind == "row":
            found.append(ROW_BREAK)
        elif kind == "degrees":
            found.append(DEGREES)
        elif kind == "words" and match[kind].strip() in CONNECTIVES:
            found.append(match[kind].strip())
        elif kind == "words" and re.search("[a-zA-Z]", match[kind]):
            found.append(rf"\text{{{match[kind]}}}")
        elif kind in ("words", "styled"):
            found += tokenize(match[kind])
        elif kind == "number":
            digits = re.sub(_GAP, "", token)
            is_list = depth > 0 and ",0" not in digits
            found += re.findall(r"[\d.]+|,", digits if is_list else digits.replace(",", ""))
        elif kind == "blank" and found[-1:] != [" "]:
            found.append(" ")
        elif kind is None and (token := _SYNONYMS.get(token, token)):
            depth += (token in ("(", "[", r"\{")) - (token in (")", "]", r"\}"))
            found.append(token)
    return found


def _in_plain_latex(text: str) -> str:
    """Return a text without Unicode's mathematics, second escapes and old notations."""
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION))
    if r"\\begin{" in text:
        return text.replace(r"\\", "\\")
    return text if r"\begin{" in text else _ESCAPED_TWICE.sub(r"\\", text)


def stripped(tokens: Sequence[str]) -> Sequence[str]:
    """Return tokens without blanks around them, and without the punctuation after them."""
    start = 0
    end = len(tokens)
    while start < end and tokens[start] == " ":
        start += 1
    while start < end and tokens[end - 1] in (" ", ".", ",", ";", ":", ROW_BREAK):
        end -= 1
    return tokens[start:end]


def is_text(token: str) -> bool:
    r"""Return whether a token is ``\text{...}``."""
    return token.startswith(r"\text{")


def content(token: str) -> str:
    r"""Return the words of ``\text{...}``."""
    return token[len(r"\text{") : -1]


def normal_form(tokens: Sequence[str]) -> str:
    """Return tokens as a text in which equal values are often equal: without blanks, and arguments have braces."""
    pieces: list[str] = []
    for i, token in enumerate(tokens):
        if token == " ":
            between_numbers = 0 < i < len(tokens) - 1 and tokens[i - 1][-1].isdigit() and tokens[i + 1][0].isdigit()
            pieces += [" "] * between_numbers
            continue
        written = "".join(content(token).split()) if is_text(token) else token
        if written[:1].isalpha() and pieces and re.fullmatch(r"\\[a-zA-Z]+", pieces[-1]):
            pieces.append(" ")  # the blank ends the command
        pieces.append(written)
    text = "".join(pieces).removeprefix("+")
    before = ""
    while text != before:  # until nested fractions all have braces
        before = text
        text = _FRACTION.sub(lambda match: f"{match[1]}{_braced(match[2])}{_braced(match[3])}", text)
    text = _BARE_ARGUMENT.sub(r"\1{\2}", text)
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else "{" + argument + "}"
