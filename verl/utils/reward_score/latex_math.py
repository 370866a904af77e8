r"""Test two LaTeX expressions for equality by evaluating both to 1000 digits at the same random points.

Equal expressions agree everywhere. Different ones practically never agree at all points by chance. Unlike symbolic
simplification, this always takes milliseconds.
"""

import operator
import random
import re
from collections.abc import Callable
from typing import TypeAlias

import mpmath

from verl.utils.reward_score.latex_tokens import GREEK

Value: TypeAlias = "mpmath.mpf | mpmath.mpc"
Node = Callable[[dict[str, Value]], Value]

LONGEST_CHARS = 300
NUM_POINTS = 4
DIGITS = 1000
MOST_EXPONENT = 10_000
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[a-zA-Z]|\\[{}|]|[-+*/^_!|(){}\[\]]")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|[A-Z]{2,})")
_PLAIN_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![a-zA-Z])")
_LOG_BASE = re.compile(r"(\\log_)(\d)")  # without braces the base is one digit
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp")
_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}
_BRACKETS = {"(": ")", "{": "}", "[": "]", "\\{": "\\}"}
_SUMS: dict[str, Callable[..., Value]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(("*", "\\cdot", "\\times"), operator.mul),
    **dict.fromkeys(("/", "\\div"), operator.truediv),
}
_ENDS = ("", "+", "-", ")", "}", "]", "\\}", "|", "\\|", "_", "^")
COMMANDS = frozenset(
    ("frac", "binom", "sqrt", "cdot", "times", "div", "log", "ln", "lg", "{", "}", "|", "varphi", *GREEK, *_FUNCTIONS)
)
"""The commands that this module knows."""


class NotAnExpression(ValueError):
    """This module cannot parse the text."""


def agree(one: str, other: str) -> bool | None:
    """Return whether two expressions are equal; None if one of them cannot be parsed or evaluated.

    Args: texts in the normal form of ``latex_tokens``.
    """
    return _compare(one, other, lambda a, b, first: _close(a, b))


def proportional(one: str, other: str) -> bool | None:
    """Return whether two expressions have a constant ratio; None if one of them cannot be parsed or evaluated."""
    return _compare(one, other, lambda a, b, first: first[0] * first[1] != 0 and _close(a * first[1], b * first[0]))


def _compare(one: str, other: str, holds: Callable[[Value, Value, tuple[Value, Value]], bool]) -> bool | None:
    """Return whether ``holds`` is true of the values at all points, given also the values at the first point."""
    try:
        nodes = [_Parser(text).parse() for text in (one, other)]
    except (NotAnExpression, RecursionError):
        return None
    variables = sorted(nodes[0][1] | nodes[1][1])
    generator = random.Random(0)
    first: tuple[Value, Value] | None = None
    with mpmath.workdps(DIGITS):
        for _ in range(NUM_POINTS if variables else 1):
            point = {name: mpmath.mpf(generator.uniform(-3, 3)) for name in variables}
            try:
                a, b = (node(point) for node, _ in nodes)
                first = first or (a, b)
                if not holds(a, b, first):
                    return False
            except NotAnExpression:  # too large to compute, by any means
                return False
            except (ArithmeticError, ValueError, TypeError):
                return None
    return True


def _close(a: Value, b: Value) -> bool:
    """Return whether two values agree; comparisons with NaN are false."""
    return bool(abs(a - b) <= mpmath.mpf(10) ** (-DIGITS // 2) * max(1, abs(a), abs(b)))


class _Parser:
    """Recursive-descent parser of one expression."""

    def __init__(self, text: str) -> None:
        text = _LOG_BASE.sub(r"\1{\2}", _PLAIN_FUNCTION.sub(r"\\\1", text))
        if len(text) > LONGEST_CHARS or _WORD.search(text):
            raise NotAnExpression(text)
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != text.replace(" ", ""):
            raise NotAnExpression(text)
        self.at = 0
        self.variables: set[str] = set()

    def parse(self) -> tuple[Node, set[str]]:
        """Parse the whole text; return the expression and the names of its variables."""
        node = self.sum()
        if self.at != len(self.tokens):
            raise NotAnExpression(self.next)
        return node, self.variables

    @property
    def next(self) -> str:
        """Return the next token without consuming it; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """Consume the next token, which must be one of ``wanted`` if any are given."""
        token = self.next
        if not token or (wanted and token not in wanted):
            raise NotAnExpression(token)
        self.at += 1
        return token

    def sum(self) -> Node:
        """Parse terms joined by plus and minus."""
        node = self.product()
        while self.next in _SUMS:
            node = _apply(_SUMS[self.take()], node, self.product())
        return node

    def product(self) -> Node:
        """Parse factors joined by multiplication, division, or nothing."""
        node = self.signed()
        while self.next not in _ENDS:
            function = _PRODUCTS.get(self.next)
            if function is None:
                node = _apply(operator.mul, node, self.power())
            else:
                self.take()
                node = _apply(function, node, self.signed())
        return node

    def signed(self) -> Node:
        """Parse a power with leading signs."""
        if self.next in ("-", "+"):
            sign = operator.neg if self.take() == "-" else operator.pos
            return _apply(sign, self.signed())
        return self.power()

    def power(self) -> Node:
        """Parse an atom followed by factorials and an exponent."""
        base = self.atom()
        while self.next == "!":
            self.take()
            base = _apply(mpmath.factorial, _apply(_bounded, base))
        if self.next != "^":
            return base
        self.take()
        return _apply(mpmath.power, base, _apply(_bounded, self.argument()))

    def argument(self) -> Node:
        """Parse a braced expression or one atom."""
        if self.next == "-":
            self.take()
            return _apply(operator.neg, self.atom())
        return self.atom()

    def enclosed(self, opening: str) -> Node:
        """Parse a bracketed expression."""
        self.take(opening)
        node = self.sum()
        self.take(_BRACKETS[opening])
        return node

    def atom(self) -> Node:
        """Parse a number, a constant, a variable, a bracket, or a command with its arguments."""
        if self.next in _BRACKETS:
            return self.enclosed(self.next)
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return lambda v: mpmath.mpf(token.rstrip("."))
        if token in ("|", "\\|"):
            inside = self.sum()
            self.take(token)
            return _apply(abs, inside)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token.isalpha() or token[1:] in (*GREEK, "varphi"):
            if self.next == "_":
                self.take()
                token += "_" + "".join(self.subscript())
            self.variables.add(token)
            return lambda v: v[token]
        return self.command(token[1:])

    def subscript(self) -> list[str]:
        """Parse the index of a variable."""
        if self.next != "{":
            return [self.take()]
        start = self.at
        while self.take() != "}":
            pass
        return self.tokens[start + 1 : self.at - 1]

    def command(self, name: str) -> Node:
        """Parse the arguments of a LaTeX command."""
        if name == "frac":
            return _apply(operator.truediv, self.argument(), self.argument())
        if name == "binom":
            return _apply(mpmath.binomial, _apply(_bounded, self.argument()), _apply(_bounded, self.argument()))
        if name == "sqrt":
            if self.next != "[":
                return _apply(mpmath.sqrt, self.argument())
            degree = self.enclosed("[")
            return _apply(_root, self.argument(), degree)
        if name in ("log", "ln", "lg"):
            return self.logarithm(name)
        if name not in _FUNCTIONS:
            raise NotAnExpression(name)
        function = getattr(mpmath, _INVERSE.get(name, name))
        exponent = None
        if self.next == "^":
            self.take()
            exponent = self.argument()
        node = _apply(function, self.enclosed("(") if self.next == "(" else self.power())
        return node if exponent is None else _apply(mpmath.power, node, exponent)

    def logarithm(self, name: str) -> Node:
        """Parse the optional base and the argument of a logarithm."""
        base: Node | None = (lambda v: mpmath.mpf(10)) if name == "lg" else None
        if self.next == "_":
            self.take()
            base = self.argument()
        node = _apply(mpmath.log, self.enclosed("(") if self.next == "(" else self.power())
        return node if base is None else _apply(operator.truediv, node, _apply(mpmath.log, base))


def _apply(function: Callable[..., Value], *nodes: Node) -> Node:
    return lambda v: function(*(node(v) for node in nodes))


_CONSTANTS: dict[str, Node] = {
    "e": lambda v: +mpmath.e,  # evaluated to the digits of the context
    "i": lambda v: mpmath.mpc(0, 1),
    "\\pi": lambda v: +mpmath.pi,
}


def _root(radicand: Value, degree: Value) -> Value:
    """Return the real root if there is one; for odd degrees of negative numbers the principal root is complex."""
    if mpmath.im(radicand) == 0 and mpmath.re(radicand) < 0 and mpmath.isint(degree) and int(mpmath.re(degree)) % 2:
        return -mpmath.power(-radicand, 1 / degree)
    return mpmath.power(radicand, 1 / degree)


def _bounded(value: Value) -> Value:
    """Reject exponents and factorials that would take too long."""
    if not abs(value) <= MOST_EXPONENT:
        raise NotAnExpression("too large")
    return value
