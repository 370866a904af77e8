"""Write the conversations of CollabLLM as parquet files for supervised or reinforcement training.

Read from the hub or from a folder with the same files; without a network, generate conversations:

    python -m recipe.collabllm.process_dataset --dataset collabllm/collabllm-multiturn-math-hard --dataset_type rl
    python -m recipe.collabllm.process_dataset --local_dataset_path ~/raw/math-hard --dataset_type sft
    python -m recipe.collabllm.process_dataset --source synthetic --dataset_type rl --local_dir ~/data/sums

A raw row is one turn: ``prompt`` (the messages before it), ``completion`` (the assistant's answer), ``score``, and the
whole task (``single_turn_prompt``, ``single_turn_completion``, ``single_turn_metadata``). ``rl`` writes each prompt
once. ``sft`` writes each conversation once, up to its last turn and with the answer that scored best there. All rows of
a conversation are in the same split.
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
"""Maps a part of a data set's name to the kind of task that its user has."""


def made_up(rng: random.Random) -> Row:
    """Generate a turn of a conversation about a sum; the user gives the second number when asked."""
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

    Raises: ValueError if the last message is not the user's.
    """
    messages = [{"role": each["role"], "content": each["content"]} for each in example["prompt"] or ()]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"the prompt must end with a message of the user: {messages[-1:]}")
    return messages


def rl_row(example: Row, kind: str, split: str, index: int) -> Row:
    """Return a prompt for reinforcement learning, with the goal of its simulated user.

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
    """Return a conversation for supervised fine-tuning: the prompt and the assistant's answer."""
    return {"messages": [*prompt_of(example), {"role": "assistant", "content": example["completion"]}]}


def each_prompt_once(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each prompt and task."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(json.dumps([row["prompt"], row["single_turn_prompt"]]), row)
    return list(first.values())


def longest_of_each_conversation(rows: Iterable[Row]) -> list[Row]:
    """Return the row of each conversation's last turn; of several answers to it, the one with the highest score."""
    best: dict[Any, tuple[tuple[int, float], Row]] = {}
    for row in rows:
        rank = (len(row["prompt"] or ()), float(row["score"] or 0.0))
        if row["conv_id"] not in best or rank > best[row["conv_id"]][0]:
            best[row["conv_id"]] = (rank, row)
    return [row for _, row in best.values()]


def split_by_conversation(rows: list[Row], share: float, seed: int) -> dict[str, list[Row]]:
    """Split rows into ``train`` and ``validation``; the latter gets ``share`` of the conversations, at least one.

    Raises: DataError for fewer than two conversations.
    """
    names = sorted({row["conv_id"] for row in rows}, key=str)
    if len(names) < 2:
        raise DataError(f"the data set has {len(names)} conversations: at least two are needed to split them")
    random.Random(seed).shuffle(names)
    held_out = set(names[: min(max(1, round(share * len(names))), len(names) - 1)])
    return {
        "train": [row for row in rows if row["conv_id"] not in held_out],
        "validation": [row for row in rows if row["conv_id"] in held_out],
    }


def tables(args: argparse.Namespace) -> dict[str, Iterator[Row]]:
    """Return the rows of each output file by its name."""
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
    add("--dataset", default=name, help=f"name of the data set on the hub (default: {name})")
    add("--dataset_type", choices=("rl", "sft"), required=True, help="prompts, or conversations")
    add("--task_desc", help="kind of task that the simulated user is told (default: by the data set's name)")
    add("--validation_size", type=float, default=0.1, help="validation share of the conversations (default: 0.1)")
    args = parser.parse_args()
    if not 0 < args.validation_size < 1:
        parser.error(f"--validation_size={args.validation_size}: write a number between 0 and 1")
    return write_tables(lambda: tables(args), args)


if __name__ == "__main__":
    sys.exit(main())
