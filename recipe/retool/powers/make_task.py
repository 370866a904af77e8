"""Write a tiny model with random weights, and the data of a task that it can solve only by running code.

    python -m recipe.retool.powers.make_task --save-dir outputs/retool

``data`` asks for the remainder of a power: ``48^39`` means 48**39 % 97. ``model`` is the model of
``examples/tiny_model.py`` with two further tokens, for the start and the end of a tool call. Half of the supervised
conversations give the right answer at once. The other half run code first, but only half of these with the numbers of
the question. So the supervised data teach the format of a call; when to call and with which numbers is left to the
reward.
"""

import os
import sys
from typing import Any

from examples.sglang_multiturn.calculator.make_task import Pair, tables
from examples.tiny_model import make_tiny_model
from examples.tiny_task import run, write_tables

from ..retool import INSTRUCTION

HEAD = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print('
TAIL = ')"}}</tool_call>'
MODULUS = 97

Row = dict[str, Any]


def rest(pair: Pair) -> str:
    """Return the remainder as text, which is the answer."""
    return str(pow(*pair, MODULUS))


def question(pair: Pair) -> Row:
    """Return the message that asks for the remainder."""
    return {"role": "user", "content": "{}^{}".format(*pair)}


def prompt_row(split: str, index: int, x: int, y: int) -> Row:
    """Return a question with its ground truth."""
    return {
        "data_source": "powers",
        "prompt": [question((x, y))],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": rest((x, y))},
        "extra_info": {"split": split, "index": index},
    }


def conversation(number: int, pair: Pair, other: Pair) -> Row:
    """Return a supervised conversation: an answer, or a program for this or another power, followed by its answer."""
    asked = question(pair)
    messages = [{**asked, "content": asked["content"] + INSTRUCTION}]  # the prompt that CustomRLHFDataset makes
    if number % 2:
        pair = pair if number % 4 == 1 else other
        code = {"role": "assistant", "content": "{}{}**{}%{}{}".format(HEAD, *pair, MODULUS, TAIL)}
        messages += [code, {"role": "tool", "content": rest(pair)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"\\boxed{{{rest(pair)}}}"}]}


def write(folder: str, seed: int) -> None:
    """Write the data and the model."""
    write_tables(folder, tables(seed, prompt_row, conversation))
    make_tiny_model(os.path.join(folder, "model"), seed=seed, words=(HEAD, TAIL))


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
