"""Write a tiny model with random weights, and the data of a task that it can solve only with a calculator.

    python examples/sglang_multiturn/calculator/make_task.py --save-dir outputs/calculator

``model`` is the model of ``examples/tiny_model.py`` with two further tokens, for the start and the end of a tool call.
``data`` asks for products of two numbers of two digits; the products have four digits. Half of the supervised
conversations give the right answer at once. The other half call the calculator first, but only half of these with the
numbers of the question. So the supervised data teach the format of a call; when to call and with which numbers is left
to the reward.
"""

import os
import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

from examples.tiny_model import make_tiny_model
from examples.tiny_task import run, write_tables

HEAD = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
TAIL = '"}}</tool_call>'
LEAST = 32
NUM_TEST = 128
NUM_SUPERVISED = 4096
NUM_SUPERVISED_TEST = 64

Row = dict[str, Any]
Pair = tuple[int, int]


def question(x: int, y: int) -> Row:
    """Return the message that asks for a product."""
    return {"role": "user", "content": f"{x}*{y}"}


def prompt_row(split: str, index: int, x: int, y: int) -> Row:
    """Return a question with its ground truth."""
    return {
        "data_source": "products",
        "prompt": [question(x, y)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(x * y)},
        "extra_info": {"split": split, "index": index},
    }


def conversation(number: int, pair: Pair, other: Pair) -> Row:
    """Return a supervised conversation: an answer, or a call for this or another product, followed by its answer."""
    x, y = pair
    messages = [question(x, y)]
    if number % 2:
        x, y = pair if number % 4 == 1 else other
        call = {"role": "assistant", "content": f"{HEAD}{x}*{y}{TAIL}"}
        messages += [call, {"role": "tool", "content": str(x * y)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"={x * y}"}]}


def tables(
    seed: int,
    prompt: Callable[[str, int, int, int], Row] = prompt_row,
    talk: Callable[[int, Pair, Pair], Row] = conversation,
) -> dict[str, list[Row]]:
    """Return the rows of each output file by its name; no question of ``test`` occurs in another split."""
    draw = random.Random(seed)
    pairs = list(product(range(LEAST, 100), repeat=2))
    draw.shuffle(pairs)
    splits = {"test": pairs[:NUM_TEST], "train": pairs[NUM_TEST:]}
    made = {name: [prompt(name, i, *pair) for i, pair in enumerate(split)] for name, split in splits.items()}
    count = NUM_SUPERVISED + NUM_SUPERVISED_TEST
    drawn = [draw.choice(splits["train"]) for _ in range(2 * count)]
    talks = [talk(i, drawn[2 * i], drawn[2 * i + 1]) for i in range(count)]
    return made | {"sft_train": talks[:NUM_SUPERVISED], "sft_test": talks[NUM_SUPERVISED:]}


def write(folder: str, seed: int) -> None:
    """Write the data and the model."""
    write_tables(folder, tables(seed))
    make_tiny_model(os.path.join(folder, "model"), seed=seed, words=(HEAD, TAIL))


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
