"""Write ReTool-SFT as conversations in which the model calls ``code_interpreter``.

A raw row is one text with the tags ``<code>``, ``<interpreter>`` and ``<answer>``. Rows with unbalanced tags are left
out.

Read from the hub or from a folder with the same files; without a network, generate sums:

    python -m recipe.retool.retool_sft_preprocess --local_save_dir ~/data/retool_sft
    python -m recipe.retool.retool_sft_preprocess --local_dataset_path ~/raw/ReTool-SFT
    python -m recipe.retool.retool_sft_preprocess --source synthetic
"""

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, prepare
from verl.utils.import_utils import dotted_name

if not __package__:  # started by its path
    __package__ = dotted_name(os.path.dirname(__file__))

from .retool import INSTRUCTION, without_fence

TOOL_CONFIG = Path(__file__).parent / "sandbox_fusion_tool_config.yaml"
QUESTION = "*user question:*"
_STEP = re.compile(r"<code>(.*?)</code>\s*<interpreter>(.*?)</interpreter>", re.DOTALL)
_ANSWER_FORM = re.compile(r"\s*Remember to place the final answer in the last part.*|</?answer>", re.DOTALL)
_ANSWER_MARK = re.compile(r"\s*</?answer>\s*")
_MARKS = ("<code>", "</code>", "<interpreter>", "</interpreter>")


def made_up(rng: random.Random) -> Row:
    """Generate a sum with its solution, in the format of the raw rows."""
    x = rng.randint(100, 999)
    y = rng.randint(100, 999)
    solution = (
        f"I add them.\n<code>\n```python\nprint({x} + {y})\n```\n</code>\n<interpreter>\n{x + y}\n</interpreter>\n"
        f"<answer>\n\\boxed{{{x + y}}}\n</answer>"
    )
    question = {"role": "user", "content": f"You may write code.\n\n{QUESTION}\nWhat is {x} + {y}?"}
    return {"messages": [question, {"role": "assistant", "content": solution}]}


RAW = RawSet("JoeYing/ReTool-SFT", ("messages",), made_up, splits=("train",))


def tool_schemas() -> list[Row]:
    """Return the schemas of the tools."""
    items: list[Row] = yaml.safe_load(TOOL_CONFIG.read_text(encoding="utf-8"))["tools"]
    return [item["tool_schema"] for item in items]


def conversation(split: str, example: Row, index: int) -> Row | None:
    """Convert a solution to a conversation with tool calls; None if its tags are unbalanced."""
    question, solution = (message["content"] for message in example["messages"][:2])
    *steps, last = _STEP.split(solution)
    said = [*steps[::3], last]
    if any(mark in text for text in said for mark in _MARKS):
        return None
    asked = _ANSWER_FORM.sub("", question.rpartition(QUESTION)[2]).strip()
    messages = [{"role": "user", "content": asked + INSTRUCTION}]
    for text, code, output in zip(said, steps[1::3], steps[2::3], strict=False):
        messages += [_call(text.strip(), without_fence(code).strip()), {"role": "tool", "content": output.strip("\n")}]
    messages.append({"role": "assistant", "content": _ANSWER_MARK.sub("\n", last).strip()})
    return {"messages": messages, "tools": json.dumps(tool_schemas())}


def _call(text: str, code: str) -> dict[str, Any]:
    function = {"name": "code_interpreter", "arguments": {"code": code}}
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}


def main() -> int:
    """Write the file; return the exit code."""
    return prepare(build_parser(__doc__, "retool_sft").parse_args(), RAW, conversation)


if __name__ == "__main__":
    sys.exit(main())
