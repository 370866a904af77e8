"""Write HellaSwag, a choice of the ending that fits, as parquet files for reinforcement learning.

Rows without a label are left out, as all of the published test split are.

Read from the hub or from a folder with the same files; without a network, generate sentences:

    python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag
    python examples/data_preprocess/hellaswag.py --local_dataset_path ~/raw/hellaswag
    python examples/data_preprocess/hellaswag.py --source synthetic --local_save_dir ~/data/hellaswag
"""

import random
import re
import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, prepare

MARKUP = re.compile(r"\[.*?\]")  # remains of the WikiHow pages' markup
PLACES = ("the kitchen", "the garden", "the garage")
DOINGS = ("washes a cup", "waters a plant", "repairs a bicycle")


def made_up(rng: random.Random) -> Row:
    """Generate the beginning of a text; its right ending names the same place."""
    place = rng.randrange(len(PLACES))
    endings = [f"and stays in {name}." for name in PLACES] + ["and flies to the moon."]
    return {
        "activity_label": "Work at home",
        "ctx_a": f"A person {DOINGS[place]} in {PLACES[place]}.",
        "ctx_b": "the person has time",
        "endings": endings,
        "label": str(place),
    }


RAW = RawSet(
    "Rowan/hellaswag",
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    made_up,
    splits=("train", "validation", "test"),
)


def plain(text: str) -> str:
    """Remove markup and repeated spaces from a text."""
    return " ".join(MARKUP.sub("", text.replace(" [title]", ". ")).split())


def row(split: str, example: Row, index: int) -> Row:
    """Return a prompt with the beginning and its endings as choices; the ground truth is the index of the right ending.

    Raises: ValueError for a label that is not the index of an ending.
    """
    choices = [plain(ending) for ending in example["endings"]]
    truth = int(example["label"])
    if not 0 <= truth < len(choices):
        raise ValueError(f"the label {truth} names none of {len(choices)} endings")
    beginning = f"{example['activity_label']}: {example['ctx_a']} {example['ctx_b'].capitalize()}"
    return {
        "data_source": RAW.hub_name,
        "prompt": [{"role": "user", "content": plain(beginning)}],
        "ability": "nlp",
        "reward_model": {
            "style": "model",
            "eval": "multiple_choice",
            "ground_truth": truth,
            "choices": choices,
        },
        "extra_info": {"split": split, "index": index},
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    args = build_parser(__doc__, "hellaswag").parse_args()

    def labelled(split: str, example: Row, index: int) -> Row | None:
        return row(split, example, index) if example["label"] != "" else None

    return prepare(args, RAW, labelled)


if __name__ == "__main__":
    sys.exit(main())
