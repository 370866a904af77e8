"""Write a tiny model with random weights, and sums to which a simulated user replies whether the answer is right.

    python examples/sglang_multiturn/sums/make_task.py --save-dir outputs/gsm8k_interaction

The sums are those of ``examples/data_preprocess/gsm8k.py --source synthetic``, whose supervised solutions forget most
carries. In these conversations the user then says that the answer is wrong, and one in five second attempts corrects
it. So the supervised data teach the format of a second attempt; how to correct the answer is left to the reward.
"""

import os
import random
import sys
from typing import Any

from examples.data_preprocess.gsm8k import solve, synthetic_tables
from examples.tiny_model import make_tiny_model
from examples.tiny_task import run, write_tables
from verl.interactions.gsm8k_interaction import WRONG
from verl.utils.reward_score import gsm8k

CARELESS = 0.8
"""Share of the second attempts that forget the carry again."""

Row = dict[str, Any]


def with_user(row: Row) -> Row:
    """Return a prompt with the arguments with which the interaction ``gsm8k`` starts."""
    info = row["extra_info"]
    started = {"name": "gsm8k", "query": info["question"], "ground_truth": row["reward_model"]["ground_truth"]}
    return {**row, "extra_info": {**info, "interaction_kwargs": started}}


def with_second_attempt(row: Row, rng: random.Random) -> Row:
    """Return a supervised conversation, extended by a second attempt if its answer is wrong."""
    question, said = row["messages"]
    x, y = map(int, question["content"].removesuffix("=?").split("+"))
    if gsm8k.extract_solution(said["content"]) == str(x + y):
        return row
    again = {"role": "assistant", "content": solve((x, y), careless=rng.random() < CARELESS)}
    return {"messages": [question, said, {"role": "user", "content": WRONG}, again]}


def tables(seed: int) -> dict[str, list[Row]]:
    """Return the rows of each output file by its name."""
    rng = random.Random(seed)
    made = synthetic_tables(seed)
    return {
        name: [with_second_attempt(row, rng) if name.startswith("sft") else with_user(row) for row in rows]
        for name, rows in made.items()
    }


def write(folder: str, seed: int) -> None:
    """Write the data and the model."""
    write_tables(folder, tables(seed))
    make_tiny_model(os.path.join(folder, "model"), seed=seed, words=[WRONG])


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
