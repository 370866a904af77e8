"""Write AIME 2024, GPQA diamond, CNMO 2024 and LiveCodeBench as one file of prompts, ``test.parquet``.

Read from the hub or from a folder with a subfolder for each task; without a network, generate problems of the same
format:

    python3 -m recipe.r1.data_process --tasks all --local_dir ~/data/r1
    python3 -m recipe.r1.data_process --tasks aime2024 --local_dataset_path ~/raw
    python3 -m recipe.r1.data_process --source synthetic --local_dir ~/data/r1
"""

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, rows_of, write_tables
from verl.utils.import_utils import dotted_name

if not __package__:  # started by its path
    __package__ = dotted_name(os.path.dirname(__file__))

from .tasks import TASKS, Task

SPLIT = "test"


def task_rows(name: str, task: Task, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the prompts of a task; a local copy is in ``<local_dataset_path>/<task>/<folder of the part>``."""
    for part in task.parts:
        folder = None
        if args.local_dataset_path is not None:
            folder = str(Path(args.local_dataset_path, name, part.folder))
        raw = part.raw.read(argparse.Namespace(**vars(args) | {"local_dataset_path": folder}))
        for split in part.raw.splits:
            yield from rows_of(raw[split], split, partial(prompt_row, part.data_source, task))


def prompt_row(data_source: str, task: Task, example: Row, index: int) -> Row:
    """Return one problem as a prompt with its ground truth."""
    content, truth = task.problem(example, index)
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": task.ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": SPLIT, "index": index},
    }


def main() -> int:
    """Write the file; return the exit code."""
    parser = build_parser(__doc__, "r1", is_local_dir_deprecated=False)
    parser.add_argument(
        "--tasks", default="all", help=f"all, or some of {','.join(TASKS)}, separated by commas (default: all)"
    )
    args = parser.parse_args()
    names = list(TASKS) if args.tasks == "all" else args.tasks.split(",")
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        parser.error(f"--tasks={args.tasks}: {unknown[0]!r} is no task: write all, or some of {','.join(TASKS)}")
    return write_tables(lambda: {SPLIT: (row for name in names for row in task_rows(name, TASKS[name], args))}, args)


if __name__ == "__main__":
    sys.exit(main())
