"""Write the preferences of full-hh-rlhf for the kind of training that ``--split`` names.

``sft`` writes two rows per prompt, one for each response. ``rm`` writes a prompt with the chosen and the rejected
response; a quarter of these rows are for testing. ``rl`` writes prompts whose responses a reward model scores.

Read from the hub or from a folder with the same files; without a network, generate conversations:

    python examples/data_preprocess/full_hh_rlhf.py --split rl --local_save_dir ~/data/full_hh_rlhf/rl
    python examples/data_preprocess/full_hh_rlhf.py --split rm --local_dataset_path ~/raw/full-hh-rlhf
    python examples/data_preprocess/full_hh_rlhf.py --split sft --source synthetic
"""

import random
import sys
from collections.abc import Iterator

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, rows_of, write_tables

TOPICS = ("a birthday cake", "a letter to a friend", "a walk in the rain", "a first day at school")
RM_TRAIN_SHARE = 0.75


def made_up(rng: random.Random) -> Row:
    """Generate a request with a helpful and an unhelpful response."""
    topic = rng.choice(TOPICS)
    chosen = f" Gladly. For {topic} it helps to plan {rng.randint(2, 9)} steps: start with the first one today."
    prompt = f"\n\nHuman: How do I prepare {topic}?\n\nAssistant:"
    return {"prompt": prompt, "response": chosen, "chosen": chosen, "rejected": " I do not know."}


RAW = RawSet("Dahoas/full-hh-rlhf", ("prompt", "chosen", "rejected"), made_up, splits=("train",))


def comparison(example: Row, index: int) -> Row:
    """Return a row for training a reward model.

    Raises: ValueError for a text that is missing or empty.
    """
    texts = {name: example[name] for name in ("prompt", "chosen", "rejected")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f"column {name!r} holds no text, it holds {text!r}")
    return texts


def rl_row(example: Row, index: int) -> Row:
    """Return a prompt for reinforcement learning with a reward model; the chosen response is kept for comparison."""
    texts = comparison(example, index)
    return {
        "data_source": RAW.hub_name,
        "prompt": [{"role": "user", "content": texts["prompt"]}],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": texts["chosen"]},
        "extra_info": {"split": "train", "index": index},
    }


def pairs(comparisons: Iterator[Row]) -> Iterator[Row]:
    """Yield two rows for supervised fine-tuning per comparison, one for each response."""
    for texts in comparisons:
        for name in ("chosen", "rejected"):
            yield {"prompt": texts["prompt"], "response": texts[name]}


def main() -> int:
    """Write the parquet files; return the exit code."""
    parser = build_parser(__doc__, "full_hh_rlhf")
    parser.add_argument("--split", choices=("sft", "rm", "rl"), required=True, help="kind of training")
    args = parser.parse_args()

    def tables() -> dict[str, Iterator[Row] | list[Row]]:
        raw = RAW.read(args)["train"]
        if args.split == "rl":
            return {"train": rows_of(raw, "train", rl_row)}
        comparisons = rows_of(raw, "train", comparison)
        if args.split == "sft":
            return {"train": pairs(comparisons)}
        rows = list(comparisons)
        cut = int(RM_TRAIN_SHARE * len(rows))
        return {"train": rows[:cut], "test": rows[cut:]}

    return write_tables(tables, args)


if __name__ == "__main__":
    sys.exit(main())
