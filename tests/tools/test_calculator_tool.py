"""The calculator against values worked out by hand and by Python's own fractions."""

import asyncio
import random
import time
from fractions import Fraction

import pytest

from verl.tools.calculator_tool import CalculatorTool, evaluate
from verl.tools.calls import BadArguments


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("10/3", "3.33333333333"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("2^10", "1024"),
        ("2**-3", "0.125"),
        ("9**0.5", "3"),
        ("1,000 * 2", "2000"),
        ("12 × 3 ÷ 4 − 1", "8"),
        ("007 + 1", "8"),
        ("1e-3 * 1E3", "1"),
        ("(((2)))*-3", "-6"),
        ("2**200", str(2**200)),
        ("1e-40", "1e-40"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


def test_random_integer_expressions_equal_fractions() -> None:
    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.randint(1, 999) for _ in range(5)]
        signs = [rng.choice("+-*") for _ in range(4)]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        wanted = eval("".join(f"Fraction({part})" if part.isdigit() else part for part in expression.split()))
        assert Fraction(evaluate(expression)) == wanted


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**0.5", "negative"),
        ("2**99999999", "too large"),
        ("9**9**9**9", "too large"),
        ("1e999999999", "too large"),
        ("(10**300)**2.5", "too large"),
        ("9" * 301, "more than 300"),
        ("", "no arithmetic"),
        ("12,34 + 1", "no arithmetic"),
        ("__import__('os')", "no arithmetic"),
        ("abs(3)", "no arithmetic"),
        ("1j", "no arithmetic"),
        ("1 2", "no arithmetic"),
        ("(" * 140, "no arithmetic"),
    ],
)
def test_refusals_are_quick(expression: str, problem: str) -> None:
    start = time.process_time()
    with pytest.raises(BadArguments, match=problem):
        evaluate(expression)
    assert time.process_time() - start < 1.0


def test_the_tool_answers_a_call() -> None:
    tool = CalculatorTool({})
    assert tool.name == "calculator"

    async def call() -> None:
        instance_id, _ = await tool.create()
        response, reward, metrics = await tool.execute(instance_id, {"expression": "6*7"})
        assert (response.text, reward, metrics) == ("42", 0.0, {})
        with pytest.raises(BadArguments, match="must be text"):
            await tool.execute(instance_id, {"expr": "6*7"})

    asyncio.run(call())
