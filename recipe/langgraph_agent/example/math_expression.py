"""Expressions with an operator that no model knows: it has to call the tool to be right."""

from langchain_core.tools import tool

from ..react_agent_loop import ReactAgentLoop


@tool
def calculate(a: int, b: int, operand: str) -> int:
    """Compute "a operand b" for two integers.

    The operand is one of "+", "-", "*" and "@".
    """
    if operand == "+":
        return a + b
    if operand == "-":
        return a - b
    if operand == "*":
        return a * b
    if operand == "@":
        return 3 * a - 2 * b
    raise ValueError(f'unknown operand "{operand}": write one of + - * @')


class MathExpressionReactAgentLoop(ReactAgentLoop):
    """Gives the model ``calculate``."""

    tools = (calculate,)
