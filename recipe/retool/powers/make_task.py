"""Write a task that a tiny model can only solve by running code: a model with random weights, and its data.

    python -m recipe.retool.powers.make_task --save-dir outputs/retool

``data`` asks for the rest of a power: ``48^39`` means 48**39 % 97. ``model`` is that of ``examples/tiny_model.py``,
with a token each for the head and the tail of a call. Half of the supervised conversations answer at once,
with the right number; the other half run code first, and only half of those with the numbers of the question. So they
teach the form of a call, and neither when to make one nor reliably of what.
"""

import argparse
import os
import sys
from typing import Any

import pandas as pd

from examples.sglang_multiturn.calculator.make_task import Pair, tables
from examples.tiny_model import make_tiny_model

from ..retool import INSTRUCTION

HEAD = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print('
TAIL = ')"}}</tool_call>'
MODULUS = 97

Row = dict[str, Any]


def rest(pair: Pair) -> str:
    """Return the answer."""
    return str(pow(*pair, MODULUS))


def question(pair: Pair) -> Row:
    """Return the message that asks for it."""
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
    """Return a supervised conversation: an answer, or a program of this or of another power and an answer."""
    asked = question(pair)
    messages = [{**asked, "content": asked["content"] + INSTRUCTION}]  # as CustomRLHFDataset asks it
    if number % 2:
        pair = pair if number % 4 == 1 else other
        code = {"role": "assistant", "content": "{}{}**{}%{}{}".format(HEAD, *pair, MODULUS, TAIL)}
        messages += [code, {"role": "tool", "content": rest(pair)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"\\boxed{{{rest(pair)}}}"}]}


def main() -> int:
    """Write model and data; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and rows (default: 0)")
    args = parser.parse_args()
    folder = os.path.expanduser(args.save_dir)
    try:
        os.makedirs(os.path.join(folder, "data"), exist_ok=True)
        for name, rows in tables(args.seed, prompt_row, conversation).items():
            pd.DataFrame(rows).to_parquet(os.path.join(folder, "data", f"{name}.parquet"))
        make_tiny_model(os.path.join(folder, "model"), seed=args.seed, words=(HEAD, TAIL))
    except OSError as error:
        sys.stderr.write(f"error: --save-dir={args.save_dir}: {error}: write another folder\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
