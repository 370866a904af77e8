"""Write a few conversations of several turns as parquet files, for a trial of supervised fine-tuning.

python examples/data_preprocess/multiturn.py --local_dir ~/data/multiturn
"""

import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import output_parser, write_tables

ROLES = ("user", "assistant")
TEACHER = "You are a patient teacher. Answer in one sentence."
TRAIN = (
    (None, "Which planet is the largest?", "Jupiter.", "And the smallest?", "Mercury, since Pluto no longer counts."),
    (None, "Translate 'good morning' to French.", "Bonjour.", "And 'good night'?", "Bonne nuit."),
    (TEACHER, "Why is the sky blue?", "Air scatters blue light more than red light.", "Why is it red at sunset?",
     "The light then passes through more air, which has scattered the blue away."),
    (TEACHER, "What is a prime number?", "A number above one that only one and itself divide.", "Is 91 prime?",
     "No, it is 7 times 13.", "Is 97?", "Yes, none of 2, 3, 5 and 7 divides it."),
    (None, "Name a yellow fruit.", "A banana.", "A red one?", "A cherry.", "A blue one?", "A plum."),
    (TEACHER, "How do I boil an egg?", "Put it into boiling water for eight minutes."),
)  # fmt: skip
TEST = (
    (None, "What is 12 plus 30?", "42.", "Minus 2?", "40."),
    (TEACHER, "What melts ice?", "Warmth above zero degrees Celsius.", "And salt?",
     "Salt too, since it lowers the melting point."),
)  # fmt: skip
SETS = {"train": TRAIN, "test": TEST}


def conversation(texts: tuple[str | None, ...]) -> Row:
    """Return the messages of a conversation: the system message, if any, then user and assistant in turn."""
    system, *turns = texts
    messages = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


def main() -> int:
    """Write the parquet files; return the exit code."""
    args = output_parser(__doc__, "multiturn", is_local_dir_deprecated=False).parse_args()
    return write_tables(lambda: {name: [conversation(c) for c in told] for name, told in SETS.items()}, args)


if __name__ == "__main__":
    sys.exit(main())
