"""Write arithmetic expressions with a made-up operator @, and conversations that show how to call the tool.

python3 -m recipe.langgraph_agent.example.create_dataset --local_save_dir ~/data/math_expression_tool
"""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import datasets

from verl.utils.import_utils import dotted_name

if not __package__:  # started by its path
    __package__ = dotted_name(os.path.dirname(__file__))

from .math_expression import calculate

QUESTION = "We define a @ b, which calculate knows. What is {expression}? Put the answer into \\boxed{{}}."
SHORT_QUESTION = "{expression}="
DATA_SOURCE = "lighteval/MATH"  # selects the scorer of boxed answers
AGENT = "math_expression"


def expression(draw: random.Random, largest: int) -> tuple[int, int, str]:
    """Return a random expression of two numbers and an operator."""
    return draw.randint(0, largest), draw.randint(0, largest), draw.choice("@@@+-*")


def row(agent: str, number: int, question: str, a: int, b: int, operand: str) -> dict[str, Any]:
    """Return a row for reinforcement learning with the given agent loop."""
    result = calculate.func(a, b, operand)
    return {
        "data_source": DATA_SOURCE,
        "agent_name": agent,
        "prompt": [{"role": "user", "content": question.format(expression=f"{a} {operand} {b}")}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(result)},
        "extra_info": {"index": number},
    }


def conversation(question: str, a: int, b: int, operand: str, calls: bool = True) -> list[dict[str, str]]:
    """Return a solution as messages: with a tool call in the format ``hermes``, or with the answer alone."""
    call = json.dumps({"name": "calculate", "arguments": {"a": a, "b": b, "operand": operand}})
    result = str(calculate.func(a, b, operand))
    asked = {"role": "user", "content": question.format(expression=f"{a} {operand} {b}")}
    steps = [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": result},
    ]
    return [asked, *(steps if calls else []), {"role": "assistant", "content": f"\\boxed{{{result}}}"}]


def main() -> None:
    """Write ``train.parquet``, ``test.parquet`` and ``sft.parquet``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", default="~/data/math_expression_tool")
    parser.add_argument("--train_size", type=int, default=5000)
    parser.add_argument("--test_size", type=int, default=500)
    parser.add_argument("--sft_size", type=int, default=1000)
    parser.add_argument("--largest", type=int, default=100, help="largest number in an expression")
    parser.add_argument("--direct", type=float, default=0.0, help="share of conversations without a tool call")
    parser.add_argument("--short", action="store_true", help="write only the expression, for tiny models")
    parser.add_argument("--agent", default=AGENT, help="agent loop of the rows, a name in agent.yaml")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    question = SHORT_QUESTION if options.short else QUESTION
    folder = Path(options.local_save_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", options.train_size), ("test", options.test_size)):
        rows = [row(options.agent, number, question, *expression(draw, options.largest)) for number in range(size)]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    talks = [
        {"messages": conversation(question, *expression(draw, options.largest), draw.random() >= options.direct)}
        for _ in range(options.sft_size)
    ]
    datasets.Dataset.from_list(talks).to_parquet(folder / "sft.parquet")


if __name__ == "__main__":
    main()
