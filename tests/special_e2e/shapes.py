"""Name the drawn shape: a task that nothing but the image answers, and the reward of a right letter."""

import io
import random
from pathlib import Path
from typing import Any

LETTERS = "CSTX"
"""Circle, square, triangle, cross; guessing is right once in four."""
SIZE = 56


def draw(letter: str, rng: random.Random) -> bytes:
    """Return a PNG of one bright shape anywhere on a dark ground."""
    from PIL import Image, ImageDraw

    ground, colour = (tuple(rng.randint(low, high) for _ in range(3)) for low, high in ((0, 40), (180, 255)))
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    pen = ImageDraw.Draw(picture)
    r = rng.randint(14, 20)
    x, y = (SIZE // 2 + rng.randint(-7, 7) for _ in range(2))
    if letter == "C":
        pen.ellipse([x - r, y - r, x + r, y + r], fill=colour)
    elif letter == "S":
        pen.rectangle([x - r, y - r, x + r, y + r], fill=colour)
    elif letter == "T":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        width = max(2, r // 3)
        pen.rectangle([x - r, y - width, x + r, y + width], fill=colour)
        pen.rectangle([x - width, y - r, x + width, y + r], fill=colour)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows for training by reward."""
    rng = random.Random(seed)
    letters = [rng.choice(LETTERS) for _ in range(count)]
    return [
        {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": "<image>shape?"}],
            "images": [{"bytes": draw(letter, rng)}],
            "reward_model": {"style": "rule", "ground_truth": letter},
            "extra_info": {"index": index},
        }
        for index, letter in enumerate(letters)
    ]


def mixed(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of text, of an image, of two images, and of an image and a video, in turn; columns of other names."""
    rng = random.Random(seed)

    def pictures(number: int) -> list[dict[str, Any]]:
        return [{"bytes": draw(rng.choice(LETTERS), rng)} for _ in range(number)]

    made = []
    for index in range(count):
        clip = {"video": pictures(4), "sample_fps": 2.0, "min_pixels": SIZE**2, "max_pixels": SIZE**2}
        content, shown, clips = [
            (f"say {index}", [], []),
            (f"{index}<image>?", pictures(1), []),
            (f"<image>, <image> {index}", pictures(2), []),
            (f"<image> or <video> {index}?", pictures(1), [clip]),
        ][index % 4]
        made.append({**rows(1, index)[0], "prompt": [{"role": "user", "content": content}]})
        del made[-1]["images"]
        made[-1] |= {"pictures": shown, "clips": clips}
    return made


def shuffled(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each row the image of another; what it shows says nothing about the row's answer."""
    images = [row["images"] for row in table]
    random.Random(0).shuffle(images)
    return [row | {"images": image, "data_source": "shuffled_shapes"} for row, image in zip(table, images, strict=True)]


def with_tool(row: dict[str, Any], side: int) -> dict[str, Any]:
    """Return a row whose image ``image_zoom_in_tool`` may cut, in a size of ``side`` pixels."""
    image = {**row["images"][0], "resized_height": side, "resized_width": side}
    kwargs = {"tools_kwargs": {"image_zoom_in_tool": {"create_kwargs": {"image": image}}}}
    return {**row, "extra_info": row["extra_info"] | kwargs}


def write(folder: Path, train: int = 1024, test: int = 128, supervised: int = 2048, side: int = 0) -> None:
    """Write ``train``, ``test``, ``shuffled`` and ``sft`` as parquet files; with ``side``, for a tool that zooms."""
    import datasets

    tested = rows(test, 1)
    taught = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_model"]["ground_truth"]}]}
        | {"images": row["images"]}
        for row in rows(supervised, 2)
    ]
    asked = [rows(train, 0), tested, shuffled(tested)]
    if side:
        asked = [[with_tool(row, side) for row in table] for table in asked]
    tables = dict(zip(("train", "test", "shuffled"), asked, strict=True)) | {"sft": taught}
    for name, table in tables.items():
        datasets.Dataset.from_list(table).to_parquet(folder / f"{name}.parquet")


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Reward the right letter and nothing else."""
    return float(solution_str == ground_truth)
