"""Write the conversations of CollabLLM as parquet files for supervised or reinforcement training.

Read the hub, or a folder with the same files; without a network, make up conversations:

    python -m recipe.collabllm.process_dataset --dataset collabllm/collabllm-multiturn-math-hard --dataset_type rl
    python -m recipe.collabllm.process_dataset --local_dataset_path ~/raw/math-hard --dataset_type sft
    python -m recipe.collabllm.process_dataset --source synthetic --dataset_type rl --local_dir ~/data/sums

A raw row is a turn: ``prompt``, the messages before it, ``completion``, the answer of an assistant, its ``score``, and
the task as a whole (``single_turn_prompt``, ``single_turn_completion``, ``single_turn_metadata``). ``rl`` writes each
prompt once; ``sft`` writes each conversation once, as far as it goes and with the best last answer. Conversations
either belong to ``train`` or to ``validation``.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from verl.errors import DataError
from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, rows_of, write_tables

SPLIT = "train"
COLUMNS = ("prompt", "completion", "conv_id", "score", "single_turn_prompt", "single_turn_completion")
KINDS = {"math": "a mathematical problem", "bigcode": "a program to write", "medium": "a document to write"}
"""Part of the name of a data set -> the kind of its tasks."""


def made_up(rng: random.Random) -> Row:
    """Return a turn of a conversation about a sum, whose second number the user says when asked."""
    one = rng.randint(1, 9)
    other = rng.randint(1, 9)
    asked = rng.random() < 0.5
    conversation = [{"role": "user", "content": f"Add something to {one}."}]
    if asked:
        conversation += [{"role": "assistant", "content": "What?"}, {"role": "user", "content": f"{other}."}]
    return {
        "prompt": conversation,
        "completion": f"It is {one + other}." if asked else "What?",
        "conv_id": rng.getrandbits(32),
        "score": rng.random(),
        "single_turn_prompt": f"Add {other} to {one}.",
        "single_turn_completion": str(one + other),
        "single_turn_metadata": None,
    }


def prompt_of(example: Row) -> list[Row]:
    """Return the messages before a turn.

    Raises: ValueError if they do not end with one of the user.
    """
    messages = [{"role": each["role"], "content": each["content"]} for each in example["prompt"] or ()]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"the prompt must end with a message of the user: {messages[-1:]}")
    return messages


def rl_row(example: Row, kind: str, split: str, index: int) -> Row:
    """Return a prompt and the goal of its user.

    Raises: ValueError for a row without a task or a right answer.
    """
    task = example["single_turn_prompt"]
    answer = example["single_turn_completion"]
    if not task or answer is None:
        raise ValueError(f"no task or no answer: single_turn_prompt={task!r}, single_turn_completion={answer!r}")
    metadata = example.get("single_turn_metadata")
    return {
        "data_source": "collabllm",
        "agent_name": "collabllm_agent",
        "prompt": prompt_of(example),
        "ability": kind,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "single_turn_metadata": json.loads(metadata) if isinstance(metadata, str) else metadata,
            "interaction_kwargs": {"name": "collabllm", "single_turn_prompt": task, "task_desc": kind},
        },
    }


def sft_row(example: Row) -> Row:
    """Return a conversation with its last answer."""
    return {"messages": [*prompt_of(example), {"role": "assistant", "content": example["completion"]}]}


def each_prompt_once(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each prompt and task."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(json.dumps([row["prompt"], row["single_turn_prompt"]]), row)
    return list(first.values())


def longest_of_each_conversation(rows: Iterable[Row]) -> list[Row]:
    """Return the last turn of each conversation, the one with the highest score if there are several."""
    best: dict[Any, tuple[tuple[int, float], Row]] = {}
    for row in rows:
        rank = (len(row["prompt"] or ()), float(row["score"] or 0.0))
        if row["conv_id"] not in best or rank > best[row["conv_id"]][0]:
            best[row["conv_id"]] = (rank, row)
    return [row for _, row in best.values()]


def split_by_conversation(rows: list[Row], share: float, seed: int) -> dict[str, list[Row]]:
    """Return the rows of ``train`` and ``validation``, which has ``share`` of the conversations, and at least one.

    Raises: DataError for a single conversation.
    """
    names = sorted({row["conv_id"] for row in rows}, key=str)
    if len(names) < 2:
        raise DataError(f"the data set has {len(names)} conversations: it takes two to split them")
    random.Random(seed).shuffle(names)
    held_out = set(names[: min(max(1, round(share * len(names))), len(names) - 1)])
    return {
        "train": [row for row in rows if row["conv_id"] not in held_out],
        "validation": [row for row in rows if row["conv_id"] in held_out],
    }


def tables(args: argparse.Namespace) -> dict[str, Iterator[Row]]:
    """Return the rows of each file."""
    raw = RawSet(args.dataset, COLUMNS, made_up, splits=(SPLIT,))
    parts = split_by_conversation(list(raw.read(args)[SPLIT]), args.validation_size, args.seed)
    if args.dataset_type == "sft":
        kept = {split: longest_of_each_conversation(rows) for split, rows in parts.items()}
        return {split: rows_of(rows, split, lambda row, index: sft_row(row)) for split, rows in kept.items()}
    kind = args.task_desc or next((text for part, text in KINDS.items() if part in args.dataset), "a task")

    def made(split: str, rows: list[Row]) -> Iterator[Row]:
        return rows_of(rows, split, lambda row, index: rl_row(row, kind, split, index))

    return {split: made(split, each_prompt_once(rows)) for split, rows in parts.items()}


def main() -> int:
    """Write the files; return the exit code."""
    parser = build_parser(__doc__, "collabllm", is_local_dir_deprecated=False)
    add = parser.add_argument
    name = "collabllm/collabllm-multiturn-math-hard"
    add("--dataset", default=name, help=f"data set of the hub (default: {name})")
    add("--dataset_type", choices=("rl", "sft"), required=True, help="prompts, or conversations")
    add("--task_desc", help="kind of the tasks, for the simulated user (default: by the name of the data set)")
    add("--validation_size", type=float, default=0.1, help="share of the conversations to validate (default: 0.1)")
    args = parser.parse_args()
    if not 0 < args.validation_size < 1:
        parser.error(f"--validation_size={args.validation_size}: write a number between 0 and 1")
    return write_tables(lambda: tables(args), args)


if __name__ == "__main__":
    sys.exit(main())
