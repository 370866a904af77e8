"""Write GSM8K, or synthetic sums in its format, as parquet files for reinforcement learning.

Read the hub, or a folder with the same files:

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/raw/gsm8k

Without a network, generate sums of two numbers; this also writes worked solutions for a supervised warm-up:

    python examples/data_preprocess/gsm8k.py --source synthetic --local_save_dir ~/data/sums

The warm-up's solutions forget most carries. So a model that imitates them gets most sums with a carry wrong, and has
something to learn from the reward.
"""

import random
import re
import sys
from functools import partial
from typing import Any

from verl.utils.dataset.preparation import SPLITS, build_parser, read_raw, rows_of, write_tables

HUB_NAME = "openai/gsm8k"
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")

NUM_TRAIN = 4096
NUM_TEST = 256
NUM_SFT = 8192
CARRY_SHARE = 0.65  # of the questions
CARELESS_SHARE = 0.75  # of the warm-up's solutions to questions with a carry

Question = tuple[int, int]
Row = dict[str, Any]


def rl_row(question: str, answer: str, ground_truth: str, split: str, index: int, content: str) -> Row:
    """Return one prompt with its ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def extract_solution(answer: str) -> str:
    """Return the number after ``####``, without commas.

    Raises: ValueError if there is none.
    """
    found = FINAL_ANSWER.search(answer)
    if found is None:
        raise ValueError(f"no '#### <number>' in the answer {answer!r}")
    return found.group(1).replace(",", "")


def gsm8k_tables(local_dataset_path: str | None) -> dict[str, list[Row]]:
    """Read the published splits from the hub or a local copy."""
    raw = read_raw(HUB_NAME, local_dataset_path, ("question", "answer"), "main")
    return {split: list(rows_of(raw[split], split, partial(published_row, split))) for split in SPLITS}


def published_row(split: str, example: Row, index: int) -> Row:
    """Return a published problem as a prompt."""
    question = example["question"]
    answer = example["answer"]
    return rl_row(question, answer, extract_solution(answer), split, index, f"{question} {INSTRUCTION}")


def has_carry(question: Question) -> bool:
    """Return whether the ones add up to ten or more."""
    return question[0] % 10 + question[1] % 10 > 9


def solve(question: Question, careless: bool = False) -> str:
    """Return a worked solution such as ``7+5=12 4+3+1=8 #### 82``; a careless one forgets the carry."""
    tens, ones = divmod(question[0], 10)
    other_tens, other_ones = divmod(question[1], 10)
    carry = int(has_carry(question) and not careless)
    total = tens + other_tens + carry
    last = (ones + other_ones) % 10
    return f"{ones}+{other_ones}={ones + other_ones} {tens}+{other_tens}+{carry}={total} #### {total}{last}"


def synthetic_tables(seed: int = 0) -> dict[str, list[Row]]:
    """Generate prompts (train, test) and careless conversations (sft_train, sft_test).

    The numbers and their sum have two digits. Test questions do not occur in the other splits, except sft_test.
    """
    rng = random.Random(seed)
    questions = [(x, y) for x in range(10, 90) for y in range(10, 90) if x // 10 + y // 10 < 9]
    rng.shuffle(questions)
    pools = {carry: [q for q in questions if has_carry(q) == carry] for carry in (True, False)}
    num_carry = round(NUM_TEST * CARRY_SHARE)
    held_out = {True: pools[True][:num_carry], False: pools[False][: NUM_TEST - num_carry]}
    kept = {carry: pool[len(held_out[carry]) :] for carry, pool in pools.items()}

    def draw() -> Question:
        return rng.choice(kept[rng.random() < CARRY_SHARE])

    test = held_out[True] + held_out[False]
    rng.shuffle(test)
    train = [draw() for _ in range(NUM_TRAIN)]
    sft = [draw() for _ in range(NUM_SFT)] + test
    conversations = [
        {
            "messages": [
                {"role": "user", "content": text_of(question)},
                {"role": "assistant", "content": solve(question, careless=rng.random() < CARELESS_SHARE)},
            ]
        }
        for question in sft
    ]
    return {
        "train": [synthetic_row(question, "train", i) for i, question in enumerate(train)],
        "test": [synthetic_row(question, "test", i) for i, question in enumerate(test)],
        "sft_train": conversations[:NUM_SFT],
        "sft_test": conversations[NUM_SFT:],
    }


def text_of(question: Question) -> str:
    """Return the question as text."""
    return f"{question[0]}+{question[1]}=?"


def synthetic_row(question: Question, split: str, index: int) -> Row:
    """Return a sum as a prompt."""
    text = text_of(question)
    return rl_row(text, solve(question), str(sum(question)), split, index, text)


def main() -> int:
    """Write the parquet files; return the exit code."""
    parser = build_parser(__doc__, "gsm8k")
    parser.add_argument("--source", choices=("hub", "synthetic"), default="hub", help="GSM8K or sums (default: hub)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic questions (default: 0)")
    args = parser.parse_args()

    def tables() -> dict[str, list[Row]]:
        return synthetic_tables(args.seed) if args.source == "synthetic" else gsm8k_tables(args.local_dataset_path)

    return write_tables(tables, args)


if __name__ == "__main__":
    sys.exit(main())
