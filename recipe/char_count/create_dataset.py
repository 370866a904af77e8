"""Write the task "count a character in a word" as parquet files for supervised and for reinforcement learning.

    python recipe/char_count/create_dataset.py --data_path ~/data/char_count

``sft/`` holds questions with worked solutions, ``rl/`` questions with the count. Each has train.parquet and
test.parquet, nine and one tenth of the rows. No word of a test file is in a train file.
"""

import argparse
import random
import string
import sys
from pathlib import Path

from verl.utils.command_line import OneLineParser
from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import write_tables

DATA_SOURCE = "char_count"
TRAIN_SHARE = 0.9
SHARE_OF_CHARACTER = 0.3
"""Probability that ``make_word`` takes the counted character instead of drawing a random letter."""


def make_word(rng: random.Random, character: str, min_length: int, max_length: int) -> str:
    """Return a word of random letters in which the given character occurs often."""
    length = rng.randint(min_length, max_length)
    others = string.ascii_lowercase
    return "".join(character if rng.random() < SHARE_OF_CHARACTER else rng.choice(others) for _ in range(length))


def question_of(word: str, character: str) -> str:
    """Return the question as text."""
    return f"How many {character} are there in {word}?"


def solve(word: str, character: str) -> str:
    r"""Return a worked solution such as ``n1 o1 n2 \boxed{2}``: each letter with the count so far."""
    counts = [word[: end + 1].count(character) for end in range(len(word))]
    steps = [f"{letter}{count}" for letter, count in zip(word, counts, strict=True)]
    return " ".join([*steps, f"\\boxed{{{counts[-1]}}}"])


def sft_row(word: str, character: str) -> Row:
    """Return a question with its solution."""
    return {"prompt": question_of(word, character), "response": solve(word, character)}


def rl_row(word: str, character: str, split: str, index: int) -> Row:
    """Return a question with the count."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question_of(word, character)}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": str(word.count(character))},
        "extra_info": {"split": split, "index": index, "word": word, "character": character},
    }


def questions(args: argparse.Namespace) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of a word and the character to count; each word is in one split only."""
    rng = random.Random(args.seed)
    made: dict[str, str] = {}
    for _ in range(args.total_number):
        character = rng.choice(string.ascii_lowercase)
        made.setdefault(make_word(rng, character, args.min_length, args.max_length), character)
    pairs = list(made.items())
    end = round(len(pairs) * TRAIN_SHARE)
    return {"train": pairs[:end], "test": pairs[end:]}


def main() -> int:
    """Write the four files; return the exit code."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data_path", default="~/data/char_count", help="output folder (default: ~/data/char_count)")
    add("--total_number", type=int, default=10000, help="number of words, duplicates included (default: 10000)")
    add("--min_length", type=int, default=5, help="length of the shortest word, in characters (default: 5)")
    add("--max_length", type=int, default=20, help="length of the longest word, in characters (default: 20)")
    add("--seed", type=int, default=0, help="seed of the words (default: 0)")
    args = parser.parse_args()
    if not 1 <= args.min_length <= args.max_length:
        parser.error(f"--min_length={args.min_length} must be at least 1 and at most --max_length={args.max_length}")
    if args.total_number < 10:
        parser.error(f"--total_number={args.total_number} must be at least 10")
    splits = questions(args)
    tables = {
        "sft": {split: [sft_row(*pair) for pair in pairs] for split, pairs in splits.items()},
        "rl": {split: [rl_row(*pair, split, i) for i, pair in enumerate(pairs)] for split, pairs in splits.items()},
    }
    for name, table in tables.items():
        output = argparse.Namespace(local_save_dir=str(Path(args.data_path) / name), hdfs_dir=None)
        code = write_tables(lambda table=table: table, output)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
