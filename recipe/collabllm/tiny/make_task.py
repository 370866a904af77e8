"""Write a model with random weights, and the data of a task in which it has to ask the user a question.

    python -m recipe.collabllm.tiny.make_task --save-dir outputs/collabllm

The assistant must write a name. Half of the prompts give the name (``write rado``); the others (``write my name``) do
not, and the user says it when asked. In a quarter of the supervised conversations the assistant asks, whether or not
the name is missing; in the others it answers at once, with ``anna`` where the name is missing. So the supervised data
teach how to ask and how to answer; when to ask is left to the reward.
"""

import os
import random
import sys
from itertools import product
from typing import Any

from examples.tiny_model import make_tiny_model
from examples.tiny_task import run, write_tables

ASKS = "who?"
GUESS = "anna"
NUM_TEST = 64
NUM_TRAIN = 1024
NUM_SUPERVISED = 4096

Row = dict[str, Any]


def request(name: str, says_it: bool) -> Row:
    """Return the first message of the user."""
    return {"role": "user", "content": f"write {name if says_it else 'my name'}"}


def prompt_row(split: str, index: int, name: str) -> Row:
    """Return a prompt whose simulated user knows the name; every second prompt already gives it."""
    return {
        "data_source": "says_it" if index % 2 else "has_to_be_asked",
        "agent_name": "collabllm_agent",
        "prompt": [request(name, bool(index % 2))],
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": name},
        "extra_info": {
            "split": split,
            "index": index,
            "interaction_kwargs": {"name": "collabllm", "single_turn_prompt": f"write {name}", "task_desc": "a name"},
        },
    }


def conversation(number: int, name: str) -> Row:
    """Return a supervised conversation."""
    says_it = bool(number % 2)
    asks = number % 8 < 2
    messages = [request(name, says_it)]
    if asks:
        messages += [{"role": "assistant", "content": ASKS}, {"role": "user", "content": name}]
    return {"messages": [*messages, {"role": "assistant", "content": name if asks or says_it else GUESS}]}


def tables(seed: int) -> dict[str, list[Row]]:
    """Return the rows of each output file by its name; no name in ``test`` occurs in another split."""
    draw = random.Random(seed)
    known = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    names = draw.sample(["".join(parts) for parts in product(known, repeat=2)], NUM_TEST + NUM_TRAIN)
    splits = {"test": names[:NUM_TEST], "train": names[NUM_TEST:]}
    made = {split: [prompt_row(split, i, name) for i, name in enumerate(each)] for split, each in splits.items()}
    return made | {"sft": [conversation(i, draw.choice(splits["train"])) for i in range(NUM_SUPERVISED)]}


def write(folder: str, seed: int) -> None:
    """Write the data and the model."""
    write_tables(folder, tables(seed))
    make_tiny_model(os.path.join(folder, "model"), seed=seed)


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
