r"""Whether two LaTeX expressions are equal: both are evaluated, to 40 digits, at the same few random points.

Expressions that are equal agree everywhere; for two that are not, to agree at every point by chance is out of the
question. Unlike simplification this takes milliseconds whatever the expressions are.
"""

import random
import re
from collections.abc import Callable
from typing import Any

LONGEST_CHARS = 300
NUM_POINTS = 4
DIGITS = 40
MOST_EXPONENT = 10_000
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[a-zA-Z]|\\[{}|]|[-+*/^_!|(){}\[\]]")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|[A-Z]{2,})")
_PLAIN_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![a-zA-Z])")
_LOG_BASE = re.compile(r"(\\log_)(\d)")  # without braces it is one digit
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp")
_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}
_BRACKETS = {"(": ")", "{": "}", "[": "]", "\\{": "\\}"}
_GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega", "varphi", "rho", "sigma")

Value = Any  # a number of mpmath
Node = Callable[[dict[str, Value]], Value]


class NotAnExpression(ValueError):
    """The text is not an expression that this module reads."""


def agree(one: str, other: str) -> bool | None:
    """Whether two expressions are equal; None where one of them is not an expression.

    Args: texts in the normal form of ``math_reward.normalize``.
    """
    import mpmath

    try:
        nodes = [_Parser(text).parse() for text in (one, other)]
    except (NotAnExpression, RecursionError):
        return None
    variables = sorted(nodes[0][1] | nodes[1][1])
    generator = random.Random(0)
    with mpmath.workdps(DIGITS):
        for _ in range(NUM_POINTS if variables else 1):
            point = {name: mpmath.mpf(generator.uniform(-3, 3)) for name in variables}
            try:
                a, b = (node(point) for node, _ in nodes)
                close = abs(a - b) <= mpmath.mpf(10) ** (-DIGITS // 2) * max(1, abs(a), abs(b))
            except (ArithmeticError, ValueError, TypeError, NotAnExpression):
                return None
            if not close:  # a comparison with NaN is false too
                return False
    return True


class _Parser:
    """Reads one expression by recursive descent."""

    def __init__(self, text: str) -> None:
        text = _LOG_BASE.sub(r"\1{\2}", _PLAIN_FUNCTION.sub(r"\\\1", text))
        if len(text) > LONGEST_CHARS or _WORD.search(text):
            raise NotAnExpression(text)
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != text:
            raise NotAnExpression(text)
        self.at = 0
        self.variables: set[str] = set()

    def parse(self) -> tuple[Node, set[str]]:
        """Return the expression and the names of its variables."""
        node = self.sum()
        if self.at != len(self.tokens):
            raise NotAnExpression(self.next)
        return node, self.variables

    @property
    def next(self) -> str:
        """The token that is read next; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """Read one of the tokens."""
        token = self.next
        if not token or (wanted and token not in wanted):
            raise NotAnExpression(token)
        self.at += 1
        return token

    def sum(self) -> Node:
        node = self.product()
        while self.next in ("+", "-"):
            sign, left, right = self.take(), node, self.product()
            if sign == "+":
                node = lambda v, a=left, b=right: a(v) + b(v)  # noqa: E731
            else:
                node = lambda v, a=left, b=right: a(v) - b(v)  # noqa: E731
        return node

    def product(self) -> Node:
        node = self.signed()
        while self.next and self.next not in ("+", "-", ")", "}", "]", "\\}", "|", "\\|", "_", "^"):
            operator = self.take() if self.next in ("*", "/", "\\cdot", "\\times", "\\div") else "*"
            left, right = node, self.signed() if operator != "*" or self.next in ("+", "-") else self.power()
            if operator in ("/", "\\div"):
                node = lambda v, a=left, b=right: a(v) / b(v)  # noqa: E731
            else:
                node = lambda v, a=left, b=right: a(v) * b(v)  # noqa: E731
        return node

    def signed(self) -> Node:
        if self.next == "-":
            self.take()
            node = self.signed()
            return lambda v: -node(v)
        if self.next == "+":
            self.take()
            return self.signed()
        return self.power()

    def power(self) -> Node:
        import mpmath

        base = self.atom()
        while self.next == "!":
            self.take()
            base = lambda v, a=base: mpmath.factorial(_bounded(a(v)))  # noqa: E731
        if self.next != "^":
            return base
        self.take()
        exponent = self.argument()
        return lambda v: mpmath.power(base(v), _bounded(exponent(v)))

    def argument(self) -> Node:
        """Read what stands in braces, or one atom."""
        if self.next == "-":
            self.take()
            node = self.atom()
            return lambda v: -node(v)
        return self.atom()

    def enclosed(self, opening: str) -> Node:
        self.take(opening)
        node = self.sum()
        self.take(_BRACKETS[opening])
        return node

    def atom(self) -> Node:
        import mpmath

        token = self.next
        if token in _BRACKETS:
            return self.enclosed(token)
        self.take()
        if token[0].isdigit() or token[0] == ".":
            number = mpmath.mpmathify(token) if token[-1] != "." else mpmath.mpmathify(token[:-1])
            if "." in token:
                with mpmath.workdps(DIGITS):
                    number = mpmath.mpf(token)
            return lambda v: number
        if token in ("|", "\\|"):
            inside = self.sum()
            self.take(token)
            return lambda v: abs(inside(v))
        if token in ("e", "i") or token == "\\pi":
            return {
                "e": lambda v: mpmath.e + 0,
                "i": lambda v: mpmath.mpc(0, 1),
                "\\pi": lambda v: mpmath.pi + 0,
            }[token]
        if token.isalpha() or token[1:] in _GREEK:
            if self.next == "_":
                self.take()
                token += "_" + "".join(self.subscript())
            self.variables.add(token)
            return lambda v: v[token]
        return self.command(token[1:])

    def subscript(self) -> list[str]:
        if self.next != "{":
            return [self.take()]
        start = self.at
        while self.take() != "}":
            pass
        return self.tokens[start + 1 : self.at - 1]

    def command(self, name: str) -> Node:
        import mpmath

        if name == "frac":
            over, under = self.argument(), self.argument()
            return lambda v: over(v) / under(v)
        if name == "binom":
            above, below = self.argument(), self.argument()
            return lambda v: mpmath.binomial(_bounded(above(v)), _bounded(below(v)))
        if name == "sqrt":
            degree = self.enclosed("[") if self.next == "[" else None
            radicand = self.argument()
            if degree is None:
                return lambda v: mpmath.sqrt(radicand(v))
            return lambda v: _root(radicand(v), degree(v))
        if name in ("log", "ln", "lg"):
            return self.logarithm(name)
        if name in _FUNCTIONS:
            function, power = getattr(mpmath, _INVERSE.get(name, name)), None
            if self.next == "^":
                self.take()
                power = self.argument()
            inside = self.power()
            if power is None:
                return lambda v: function(inside(v))
            return lambda v: mpmath.power(function(inside(v)), power(v))
        raise NotAnExpression(name)

    def logarithm(self, name: str) -> Node:
        import mpmath

        base: Node | None = (lambda v: mpmath.mpf(10)) if name == "lg" else None
        if self.next == "_":
            self.take()
            base = self.argument()
        inside = self.power()
        if base is None:
            return lambda v: mpmath.log(inside(v))
        return lambda v: mpmath.log(inside(v)) / mpmath.log(base(v))


def _root(radicand: Value, degree: Value) -> Value:
    """Return the real root where there is one, which for an odd degree the principal one is not."""
    import mpmath

    if mpmath.im(radicand) == 0 and mpmath.re(radicand) < 0 and mpmath.isint(degree) and int(mpmath.re(degree)) % 2:
        return -mpmath.power(-radicand, 1 / degree)
    return mpmath.power(radicand, 1 / degree)


def _bounded(value: Value) -> Value:
    """Refuse exponents and factorials that would take for ever."""
    if not abs(value) <= MOST_EXPONENT:
        raise NotAnExpression("too large")
    return value
