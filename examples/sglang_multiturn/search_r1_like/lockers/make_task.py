"""Write a tiny model with random weights, and data and corpus of a task that it can solve only by searching.

    python examples/sglang_multiturn/search_r1_like/lockers/make_task.py --save-dir outputs/search

``corpus.jsonl`` has one document for each of 4,128 lockers, which tells its code of three letters. ``data`` asks for
codes. The lockers of ``test`` are in no other split, so only the corpus tells their codes. Three of five supervised
conversations give the right code at once. The other two search first, a quarter of these for another locker than the
question's. So the supervised data teach the format of a search; when and for what to search is left to the reward.
"""

import os
import random
import sys
from typing import Any

import pandas as pd

from examples.tiny_model import make_tiny_model
from examples.tiny_task import run, write_tables

HEAD = '<tool_call>{"name": "search", "arguments": {"query_list": ["'
TAIL = '"]}}</tool_call>'
OPEN = "<answer>"
CLOSE = "</answer>"
BEFORE = '{"result": "Doc 1 (Title: Locker '
BETWEEN = ")\\nThe code is "
AFTER = '.\\n"}'
"""The text of the answer of ``SearchTool`` before the number, between number and code, and after the code."""
ASKS = "code of locker "
TEXTS = (HEAD, TAIL, OPEN, CLOSE, BEFORE, BETWEEN, AFTER, ASKS)
"""Texts that many conversations contain; each becomes one token."""
NUM_TEST = 128
NUM_TRAIN = 4000
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""The letters of codes. Without vowels no code contains an English article, which the scorer would ignore."""
NUM_SUPERVISED = 8192
NUM_SUPERVISED_TEST = 64

Row = dict[str, Any]
Fact = tuple[str, str]
"""A locker and its code."""


def made_up_facts(draw: random.Random) -> list[Fact]:
    """Draw lockers with their codes.

    No character occurs twice in a number or in a code. A tiny model copies a text by looking up which character
    followed the previous one, and makes mistakes if there are two candidates.
    """
    numbers = [str(number) for number in range(1000, 10000) if len(set(str(number))) == 4]
    lockers = draw.sample(numbers, NUM_TEST + NUM_TRAIN)
    return [(locker, "".join(draw.sample(LETTERS, 3))) for locker in lockers]


def document(number: int, locker: str, code: str) -> Row:
    """Return the document of the corpus on a locker."""
    return {"id": str(number), "contents": f"Locker {locker}\nThe code is {code}."}


def shown(locker: str, code: str) -> str:
    """Return the answer of ``SearchTool`` to a query that finds one document."""
    return f"{BEFORE}{locker}{BETWEEN}{code}{AFTER}"


def question(locker: str) -> Row:
    """Return the message that asks for a code."""
    return {"role": "user", "content": f"{ASKS}{locker}?"}


def prompt_row(split: str, index: int, locker: str, code: str) -> Row:
    """Return a question with its ground truth."""
    return {
        "data_source": "lockers",
        "prompt": [question(locker)],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [code]}},
        "extra_info": {"split": split, "index": index},
    }


def conversation(number: int, fact: Fact, other: Fact) -> Row:
    """Return a supervised conversation: an answer, or a search for this or another locker, followed by its answer."""
    locker, code = fact
    messages = [question(locker)]
    if number % 5 < 2:
        locker, code = other if number % 10 == 6 else fact
        call = {"role": "assistant", "content": f"{HEAD}{locker}{TAIL}"}
        messages += [call, {"role": "tool", "content": shown(locker, code)}]
    return {"messages": [*messages, {"role": "assistant", "content": f"{OPEN}{code}{CLOSE}"}]}


def tables(seed: int) -> tuple[list[Row], dict[str, list[Row]]]:
    """Return the corpus, and the rows of each data file by its name."""
    draw = random.Random(seed)
    facts = made_up_facts(draw)
    splits = {"test": facts[:NUM_TEST], "train": facts[NUM_TEST:]}
    made = {name: [prompt_row(name, i, *fact) for i, fact in enumerate(split)] for name, split in splits.items()}
    count = NUM_SUPERVISED + NUM_SUPERVISED_TEST
    drawn = [draw.choice(splits["train"]) for _ in range(2 * count)]
    talks = [conversation(i, drawn[2 * i], drawn[2 * i + 1]) for i in range(count)]
    corpus = [document(number, *fact) for number, fact in enumerate(facts)]
    return corpus, made | {"sft_train": talks[:NUM_SUPERVISED], "sft_test": talks[NUM_SUPERVISED:]}


def write(folder: str, seed: int) -> None:
    """Write the corpus, the data and the model."""
    corpus, rows_of_file = tables(seed)
    pd.DataFrame(corpus).to_json(os.path.join(folder, "corpus.jsonl"), orient="records", lines=True)
    write_tables(folder, rows_of_file)
    make_tiny_model(os.path.join(folder, "model"), seed=seed, words=TEXTS)


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
