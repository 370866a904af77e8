"""Write GSM8K, or synthetic sums in its format, as parquet files for reinforcement learning.

Read from the hub or from a folder with the same files:

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/raw/gsm8k

Without a network, generate sums of two numbers; this also writes worked solutions for a supervised warm-up:

    python examples/data_preprocess/gsm8k.py --source synthetic --local_save_dir ~/data/sums

The solutions for the warm-up forget most carries. A model that imitates them gets most sums with a carry wrong, which
leaves something to learn from the reward.
"""

import random
import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare, write_tables
from verl.utils.dataset.raw_sets import GSM8K, final_number

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

NUM_TRAIN = 4096
NUM_TEST = 256
NUM_SFT = 8192
CARRY_SHARE = 0.65  # share of the questions that have a carry
CARELESS_SHARE = 0.75  # share of the warm-up's solutions that forget the carry

Question = tuple[int, int]


def rl_row(question: str, answer: str, ground_truth: str, split: str, index: int, content: str) -> Row:
    """Return one prompt with its ground truth."""
    return {
        "data_source": GSM8K.hub_name,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def published_row(split: str, example: Row, index: int) -> Row:
    """Return a published problem as a prompt."""
    question = example["question"]
    answer = example["answer"]
    return rl_row(question, answer, final_number(answer), split, index, f"{question} {INSTRUCTION}")


def has_carry(question: Question) -> bool:
    """Return whether the last digits add up to ten or more."""
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
    args = build_parser(__doc__, "gsm8k").parse_args()
    if args.source == "synthetic":
        return write_tables(lambda: synthetic_tables(args.seed), args)
    return prepare(args, GSM8K, published_row)


if __name__ == "__main__":
    sys.exit(main())
