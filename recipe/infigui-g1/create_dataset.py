"""Write pictures of a screen with two buttons, and ask for one by its colour, as parquet files for a small model.

    python3 recipe/infigui-g1/create_dataset.py --local_save_dir ~/data/screens

``train`` and ``test`` are prompts with the bounding box of the button. ``sft_train`` and ``sft_test`` are conversations
for a supervised warm-up, which point at a random button: they teach the format, and leave the choice to the reward.
"""

import json
import random
import sys

import datasets
from PIL import Image, ImageDraw

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import output_parser, write_tables

DATA_SOURCE = "screens"
CELL = 28
"""Side of a cell of the two by two grid, in pixels; Qwen2.5-VL turns a cell into one token."""
COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
SIZES = {"train": 1024, "test": 128, "sft_train": 2048, "sft_test": 128}
TWO_CANDIDATES_SHARE = 0.3


def draw(rng: random.Random) -> tuple[Image.Image, dict[str, list[int]]]:
    """Draw a screen; return it with the bounding box of each button."""
    screen = Image.new("RGB", (2 * CELL, 2 * CELL), (230, 230, 230))
    canvas = ImageDraw.Draw(screen)
    boxes = {}
    for (name, colour), cell in zip(COLOURS.items(), rng.sample(range(4), 2), strict=True):
        left = cell % 2 * CELL
        top = cell // 2 * CELL
        boxes[name] = [left, top, left + CELL - 1, top + CELL - 1]
        canvas.rectangle(boxes[name], fill=colour)
    return screen, boxes


def response(boxes: list[list[int]]) -> str:
    """Return a response whose candidates are the centers of the boxes."""
    points = [{"point_2d": [(box[0] + box[2] + 1) // 2, (box[1] + box[3] + 1) // 2]} for box in boxes]
    return f"<think></think>{json.dumps(points)}"


def row(split: str, rng: random.Random, index: int) -> Row:
    """Return a prompt, or a conversation for the supervised warm-up."""
    screen, boxes = draw(rng)
    name = rng.choice(list(COLOURS))
    prompt = {"role": "user", "content": f"<image>{name}"}
    if split.startswith("sft"):
        candidates = rng.sample(list(boxes.values()), 2)
        chosen = candidates if rng.random() < TWO_CANDIDATES_SHARE else candidates[:1]
        return {"messages": [prompt, {"role": "assistant", "content": response(chosen)}], "images": [screen]}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [prompt],
        "images": [screen],
        "ability": "gui",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(boxes[name])},
        "extra_info": {"split": split, "index": index},
    }


def main() -> int:
    """Write the files; return the exit code."""
    parser = output_parser(__doc__, "screens", is_local_dir_deprecated=False)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random screens (default: 0)")
    args = parser.parse_args()
    rng = random.Random(args.seed)

    def tables() -> dict[str, datasets.Dataset]:
        return {
            split: datasets.Dataset.from_list([row(split, rng, index) for index in range(size)])
            for split, size in SIZES.items()
        }

    return write_tables(tables, args)


if __name__ == "__main__":
    sys.exit(main())
