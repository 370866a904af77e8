"""A calculator: exact arithmetic on expressions of the model, parsed and never executed."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from verl.tools.base_tool import BaseTool, Executed
from verl.tools.calls import BadArguments
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.json_types import Json, JsonObject

MOST_CHARS = 300
MOST_BITS = 4096
"""Size of the largest numerator and denominator, so that no expression takes long."""
DIGITS = 12
"""Significant digits of a result that is no integer."""

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_WRITTEN_OTHERWISE = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_ALLOWED = re.compile(r"[\d\s.()+\-*/%^eE]*")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


class CalculatorTool(BaseTool):
    """Evaluates ``expression``: numbers, parentheses, and the operators + - * / // % **."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is not None:
            return self.tool_schema
        expression = {"type": "string", "description": "An arithmetic expression, such as (3 + 4) * 12 / 5."}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        function = {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": parameters,
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Answer the value of ``expression``; the reward is 0.

        Raises: BadArguments if it is no expression, or has no value.
        """
        expression = parameters.get("expression")
        if not isinstance(expression, str | int | float):
            raise BadArguments("expression must be text, such as (3 + 4) * 12 / 5.")
        return ToolResponse(text=evaluate(str(expression))), 0.0, {}


def evaluate(expression: str) -> str:
    """Return the value of an arithmetic expression: exact if it is an integer, else with ``DIGITS`` digits.

    Raises: BadArguments if it is no expression, or has no value.
    """
    if len(expression) > MOST_CHARS:
        raise BadArguments(f"the expression has more than {MOST_CHARS} characters.")
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), expression)
    text = _LEADING_ZEROS.sub("", text).translate(_WRITTEN_OTHERWISE).replace("^", "**").strip()
    if not _ALLOWED.fullmatch(text):
        raise BadArguments(f"{expression!r} is no arithmetic expression.")
    try:
        return _written(_value(ast.parse(text, mode="eval").body, text))
    except ZeroDivisionError:
        raise BadArguments("division by zero.") from None
    except OverflowError:
        raise BadArguments("the numbers are too large.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadArguments(f"{expression!r} is no arithmetic expression.") from None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _limited(Fraction(_digits(node, text)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left = _value(node.left, text)
        right = _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATIONS:
            return _limited(_OPERATIONS[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _digits(node: ast.Constant, text: str) -> str:
    """Return a number as it is written, since a float is not exactly that.

    Raises: BadArguments for an exponent that is too large, before the number is made.
    """
    written = text.encode()[node.col_offset : node.end_col_offset].decode()
    _, _, exponent = written.lower().partition("e")
    if exponent and abs(int(exponent)) > MOST_BITS // 4:
        raise BadArguments("the numbers are too large.")
    return written


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        value = float(base) ** float(exponent) if base >= 0 else 0j
        if isinstance(value, complex):
            raise BadArguments("a root of a negative number is not real.")
        return Fraction(Context(prec=DIGITS + 3).create_decimal_from_float(value))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * max(bits - 1, 0) > MOST_BITS:
        raise BadArguments("the numbers are too large.")
    return _limited(base ** int(exponent))


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise BadArguments("the numbers are too large.")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    decimal = Context(prec=DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator)).normalize()
    plain = f"{decimal:f}"
    return plain if len(plain) <= 2 * DIGITS else f"{decimal:e}"
