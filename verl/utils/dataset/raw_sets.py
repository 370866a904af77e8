"""The published data sets that several scripts of ``examples/data_preprocess`` read, and rows made up like theirs."""

import io
import random
import re

from PIL import Image, ImageDraw

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet

# ---- GSM8K: problems in words, and solutions that end with ``#### <number>``

_FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_STORIES = (
    ("{who} has {x} {thing} and buys {y} more. How many {thing} does {who} have now?", "+"),
    ("{who} picks {x} {thing} on Monday and {y} on Tuesday. How many {thing} is that in all?", "+"),
    ("{who} fills {x} boxes with {y} {thing} each. How many {thing} are in the boxes?", "*"),
)
_NAMES = ("Ada", "Ben", "Chen", "Dora")
GSM8K_TOOL = "calc_gsm8k_reward"
_THINGS = ("apples", "marbles", "stamps")


def final_number(answer: str) -> str:
    """Return the number after ``####``, without commas.

    Raises: ValueError if there is none.
    """
    found = _FINAL_ANSWER.search(answer)
    if found is None:
        raise ValueError(f"no '#### <number>' in the answer {answer!r}")
    return found.group(1).replace(",", "")


def _story(rng: random.Random) -> Row:
    text, sign = rng.choice(_STORIES)
    x = rng.randint(2, 60)
    y = rng.randint(2, 60)
    total = x + y if sign == "+" else x * y
    question = text.format(who=rng.choice(_NAMES), thing=rng.choice(_THINGS), x=x, y=y)
    return {"question": question, "answer": f"{x} {sign} {y} = <<{x}{sign}{y}={total}>>{total}\n#### {total:,}"}


GSM8K = RawSet("openai/gsm8k", ("question", "answer"), _story, subset="main")


def gsm8k_row(split: str, example: Row, index: int, system: str, instruction: str) -> Row:
    """Return a problem as a prompt with a system message."""
    question = example["question"]
    answer = example["answer"]
    return {
        "data_source": GSM8K.hub_name,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{question} {instruction}".strip()},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def gsm8k_tool_row(split: str, example: Row, index: int) -> Row:
    """Return a problem for a model that may ask a tool for the score of a number."""
    system = (
        f"Solve the problem step by step. When you have a result, call the tool `{GSM8K_TOOL}` with it at least once, "
        'and correct your solution if the score is low. End with the final answer in the form "#### <number>".'
    )
    row = gsm8k_row(split, example, index, system, 'Think step by step and end with the answer after "####".')
    truth = row["reward_model"]["ground_truth"]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {GSM8K_TOOL: {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"query": example["question"], "ground_truth": truth},
    }
    return row


# ---- Geometry3K: figures with a question

SIDE = 56  # pixels of a drawn figure
CELL = 7  # pixels per unit of length in a figure

Figure = tuple[str, int, int]
"""(kind, width, height) in units."""

_FIGURES: list[Figure] = [("square", n, n) for n in (1, 2, 3)] + [("triangle", 2 * n, n) for n in (1, 2)]
_FIGURES += [("rectangle", w, h) for w in (1, 2, 3, 4) for h in (1, 2, 3) if w != h and w * h < 10]


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


def _drawn(rng: random.Random) -> Row:
    figure = rng.choice(_FIGURES)
    images = [{"bytes": draw(figure, rng), "path": None}]
    return {"images": images, "problem": "<image>area?", "answer": str(area(figure))}


GEOMETRY3K = RawSet("hiyouga/geometry3k", ("problem", "answer", "images"), _drawn, image_column="images")


# ---- competition mathematics with the answer as ground truth, as DAPO-Math-17k and AIME-2024 store it


def _competition(rng: random.Random) -> Row:
    x, y, z = (rng.randint(2, 30) for _ in range(3))
    text = f"Let $a={x}$, $b={y}$ and $c={z}$. Find $ab+c$.\n\nEnd with a line of the form Answer: $Answer"
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(x * y + z), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{rng.getrandbits(64):016x}"},
    }


def competition_set(hub_name: str) -> RawSet:
    """Return the raw set of competition problems with this hub name, which has one split."""
    columns = ("data_source", "prompt", "ability", "reward_model", "extra_info")
    return RawSet(hub_name, columns, _competition, splits=("train",))


def with_code_interpreter(split: str, example: Row, index: int) -> Row:
    """Return a row of such a set for an agent that may run Python."""
    truth = example["reward_model"]["ground_truth"]
    tools = {"code_interpreter": {"create_kwargs": {"ground_truth": truth}}}
    extra = {**example["extra_info"], "need_tools_kwargs": True, "tools_kwargs": tools}
    return {**example, "extra_info": extra}
