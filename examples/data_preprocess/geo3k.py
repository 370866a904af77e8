"""Write Geometry3K, or synthetic figures, as parquet files for reinforcement learning with images.

Read the hub, or a folder with the same files:

    python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
    python examples/data_preprocess/geo3k.py --local_dataset_path ~/raw/geometry3k

Without a network, draw figures and ask for their area; this also writes answers for a supervised warm-up:

    python examples/data_preprocess/geo3k.py --synthetic --local_save_dir ~/data/figures
"""

import io
import random
import sys
from typing import Any

import datasets
from PIL import Image, ImageDraw

from verl.utils.dataset.preparation import SPLITS, build_parser, read_raw, write_tables

HUB_NAME = "hiyouga/geometry3k"
DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)

NUM_TRAIN = 1024
NUM_TEST = 128
NUM_SFT = 2048
SIDE = 56  # pixels of a figure
CELL = 7  # pixels of a unit of length

Row = dict[str, Any]


def rl_row(problem: str, answer: str, images: list[Any], split: str, index: int, instruction: str) -> Row:
    """Return one prompt with its ground truth; ``problem`` holds ``<image>`` for each of its images."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem} {instruction}".strip()}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
    }


def geo3k_tables(local_dataset_path: str | None) -> dict[str, datasets.Dataset]:
    """Read the published splits from the hub or a local copy; images stay encoded."""
    raw = read_raw(HUB_NAME, local_dataset_path, ("problem", "answer", "images"))

    def as_row(example: Row, index: int, split: str) -> Row:
        return rl_row(example["problem"], example["answer"], example["images"], split, index, INSTRUCTION)

    return {
        split: raw[split]
        .cast_column("images", datasets.List(datasets.Image(decode=False)))
        .map(
            as_row,
            with_indices=True,
            fn_kwargs={"split": split},
            remove_columns=[name for name in raw[split].column_names if name != "images"],
        )
        for split in SPLITS
    }


# ---- synthetic figures

Figure = tuple[str, int, int]
"""(kind, width, height) in units."""


def area(figure: Figure) -> int:
    """Return the area of a figure."""
    kind, width, height = figure
    return width * height // (2 if kind == "triangle" else 1)


def draw(figure: Figure, rng: random.Random) -> bytes:
    """Return a PNG of a bright figure at a random place on a dark background with a grid of units."""
    kind, width, height = figure
    picture = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(0, 50) for _ in range(3)))
    pen = ImageDraw.Draw(picture)
    for at in range(0, SIDE, CELL):
        pen.line([(at, 0), (at, SIDE)], fill=(70, 70, 70))
        pen.line([(0, at), (SIDE, at)], fill=(70, 70, 70))
    units = SIDE // CELL
    left, top = (CELL * rng.randint(0, units - side) for side in (width, height))
    right = left + CELL * width
    bottom = top + CELL * height
    colour = tuple(rng.randint(140, 255) for _ in range(3))
    if kind == "triangle":
        pen.polygon([(left, bottom), (right, bottom), (left, top)], fill=colour)
    else:
        pen.rectangle([left, top, right, bottom], fill=colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def synthetic_tables(seed: int = 0) -> dict[str, datasets.Dataset]:
    """Generate prompts (train, test) and conversations for a warm-up (sft_train, sft_test)."""
    rng = random.Random(seed)
    figures = [("square", n, n) for n in (1, 2, 3)] + [("triangle", 2 * n, n) for n in (1, 2)]
    figures += [("rectangle", w, h) for w in (1, 2, 3, 4) for h in (1, 2, 3) if w != h and w * h < 10]

    def row(split: str, index: int) -> Row:
        figure = rng.choice(figures)
        images = [{"bytes": draw(figure, rng), "path": None}]
        return rl_row("<image>area?", str(area(figure)), images, split, index, instruction="")

    def conversation(split: str, index: int) -> Row:
        made = row(split, index)
        answer = {"role": "assistant", "content": rf"\boxed{{{made['reward_model']['ground_truth']}}}"}
        return {"messages": [*made["prompt"], answer], "images": made["images"]}

    sizes = {"train": NUM_TRAIN, "test": NUM_TEST, "sft_train": NUM_SFT, "sft_test": NUM_TEST}
    return {
        split: datasets.Dataset.from_list(
            [(conversation if split.startswith("sft") else row)(split, index) for index in range(size)]
        )
        for split, size in sizes.items()
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    parser = build_parser(__doc__, "geo3k")
    parser.add_argument("--synthetic", action="store_true", help="draw figures instead of reading Geometry3K")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic figures (default: 0)")
    args = parser.parse_args()

    def tables() -> dict[str, datasets.Dataset]:
        return synthetic_tables(args.seed) if args.synthetic else geo3k_tables(args.local_dataset_path)

    return write_tables(tables, args)


if __name__ == "__main__":
    sys.exit(main())
