"""A tool for expressions with a made-up operator: a model can only be right if it calls the tool."""

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
    """The agent loop with the tool ``calculate``."""

    tools = (calculate,)
