"""Write a tiny model with random weights, and the data of a task that it can solve only by zooming in.

    python3 -m recipe.deepeyes.textures --save-dir outputs/deepeyes

Each picture has four quarters with a texture of lines. The prompt shows a smaller copy, in which all quarters are
uniformly grey. The question names a quarter, and the answer is its texture. Of five supervised conversations three
guess at once; one zooms in on the quarter of the question, and one on a random quarter. So the supervised data teach
the format of a call and how to read a texture; when and where to zoom in is left to the reward.
"""

import io
import os
import random
import sys
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

from examples.tiny_model import VL_KINDS, tiny_vl_config, vision_tokenizer, vl_processor
from examples.tiny_task import run

from .deepeyes import CustomRLHFDataset

DATA_SOURCE = "textures"
KIND = "qwen2_5_vl"
HEAD = '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": ['
TAIL = "]}}</tool_call>"
SHOWN = "Zoomed in on the image to the region "
"""The start of the tool's answer, which the tokenizer has as one token. With 37 tokens, one per character, between the
picture and the model's answer, this small model does not learn to read a texture."""
ANSWER = "<answer>"
END = "</answer>"
QUARTER = 56
"""Side of a quarter of the picture, in pixels."""
SMALL = 56
"""Side of the copy in the prompt, in pixels."""
PLACES = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
TEXTURES = "HVCP"
"""The textures by their letters: horizontal lines, vertical lines, checkerboard, plain."""
SIZES = {"train": 1024, "test": 128, "sft_train": 4096, "sft_test": 64}

Row = dict[str, Any]


class TextureDataset(CustomRLHFDataset):
    """The recipe's data set without the system prompt, which would be most of the tokens of these short prompts."""

    system = ""


def texture(letter: str, rng: random.Random) -> np.ndarray:
    """Draw one quarter, (QUARTER, QUARTER), with random brightness and a random contrast that fades towards the sides.

    Lines are one pixel wide, so that a copy of half the size averages them to the same grey for all textures.
    """
    rows, columns = np.indices((QUARTER, QUARTER))
    sign = {"H": rows, "V": columns, "C": rows + columns}.get(letter)
    level = rng.randint(110, 145)
    contrast = rng.randint(70, 110)
    if sign is None:
        return np.full((QUARTER, QUARTER), float(level))
    fade = np.sin(np.pi * (np.arange(QUARTER) + 0.5) / QUARTER) ** 2
    return level + contrast * fade[:, None] * fade * (1 - 2 * (sign % 2))


def draw(letters: str, rng: random.Random) -> Image.Image:
    """Draw a picture, given the letter of the texture of each of ``PLACES``."""
    grey = np.zeros((2 * QUARTER, 2 * QUARTER))
    for letter, (x, y) in zip(letters, PLACES.values(), strict=True):
        grey[y * QUARTER : (y + 1) * QUARTER, x * QUARTER : (x + 1) * QUARTER] = texture(letter, rng)
    return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")


def box_of(place: str) -> list[int]:
    """Return the bounding box of a quarter: left, top, right, bottom."""
    x, y = (QUARTER * index for index in PLACES[place])
    return [x, y, x + QUARTER, y + QUARTER]


def as_png(image: Image.Image) -> bytes:
    """Encode an image as PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def small(picture: Image.Image) -> Row:
    """Return the picture with the small size at which the prompt shows it."""
    return {"bytes": as_png(picture), "resized_height": SMALL, "resized_width": SMALL}


def prompt_row(split: str, index: int, rng: random.Random) -> Row:
    """Return a prompt with its ground truth, and the full picture for the zoom tool."""
    letters = "".join(rng.choice(TEXTURES) for _ in PLACES)
    place = rng.choice(list(PLACES))
    picture = draw(letters, rng)
    kwargs = {"image_zoom_in_tool": {"create_kwargs": {"image": {"bytes": as_png(picture)}}}}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"<image>{place}"}],
        "images": [small(picture)],
        "ability": "perception",
        "reward_model": {"style": "rule", "ground_truth": letters[list(PLACES).index(place)]},
        "extra_info": {"split": split, "index": index, "question": f"texture, {place}", "tools_kwargs": kwargs},
    }


def conversation(number: int, rng: random.Random) -> Row:
    """Return a supervised conversation: a guess, or a zoom into the right or a random quarter and its texture."""
    letters = "".join(rng.choice(TEXTURES) for _ in PLACES)
    place = rng.choice(list(PLACES))
    picture = draw(letters, rng)
    said = rng.choice(TEXTURES)
    images = [small(picture)]
    messages = [{"role": "user", "content": f"<image>{place}"}]
    if number % 5 < 2:
        looked = rng.choice(list(PLACES)) if number % 5 else place
        box = box_of(looked)
        said = letters[list(PLACES).index(looked)]
        sides = {"resized_height": QUARTER, "resized_width": QUARTER}
        images.append({"bytes": as_png(picture.crop((box[0], box[1], box[2], box[3]))), **sides})
        messages += [
            {"role": "assistant", "content": f"{HEAD}{', '.join(map(str, box))}{TAIL}"},
            {"role": "tool", "content": f"<image>{SHOWN}{box}."},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": f"{ANSWER}{said}{END}"}], "images": images}


def write_model(folder: str, seed: int) -> None:
    """Write the model and its processor, whose tokenizer has one token for each fixed part of calls and answers."""
    tokenizer = vision_tokenizer(KIND)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (HEAD, TAIL, SHOWN, ANSWER, END)])
    torch.manual_seed(seed)
    config = tiny_vl_config(KIND, tokenizer, hidden_size=64)
    model = getattr(transformers, f"{VL_KINDS[KIND]}ForConditionalGeneration")(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    vl_processor(KIND, tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tables(seed: int) -> dict[str, list[Row]]:
    """Return the rows of each output file by its name."""
    made = {}
    for number, (split, size) in enumerate(SIZES.items()):
        rng = random.Random(10 * seed + number)
        is_talk = split.startswith("sft")
        made[split] = [conversation(i, rng) if is_talk else prompt_row(split, i, rng) for i in range(size)]
    return made


def write(folder: str, seed: int) -> None:
    """Write the data and the model."""
    for name, rows in tables(seed).items():
        datasets.Dataset.from_list(rows).to_parquet(os.path.join(folder, "data", f"{name}.parquet"))
    write_model(os.path.join(folder, "model"), seed)


def main() -> int:
    """Write the task into the folder of the command line; return the exit code."""
    return run(__doc__, write)


if __name__ == "__main__":
    sys.exit(main())
