"""Show the dumps of ``trainer.rollout_data_dir`` and ``trainer.validation_data_dir`` in the terminal.

python scripts/rollout_viewer.py DIR                          a table of the newest step
python scripts/rollout_viewer.py DIR --step all --max-score 0 all samples that scored 0 or less
python scripts/rollout_viewer.py DIR --step 10 --show 3       sample 3 of step 10, in full

In a terminal it then asks for the samples to show in full.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TEXTS = ("input", "output", "gts")
CELL_CHARS = 60

Sample = dict[str, Any]
"""One line of a dump, with its number in the file as ``sample``."""


class DumpError(ValueError):
    """A dump cannot be read."""


def dump_files(path: Path, step: str | None) -> list[Path]:
    """Return the given file, or a folder's dumps sorted by step: of one step, of "all" steps, or of the newest step."""
    if path.is_file():
        return [path]
    named = (file for file in path.glob("*.jsonl") if file.is_file() and file.stem.isdecimal())
    files = {str(int(file.stem)): file for file in sorted(named, key=lambda file: int(file.stem))}
    if not files:
        raise DumpError(f"{path} holds no <step>.jsonl; give the folder of trainer.rollout_data_dir, or a file in it")
    if step == "all":
        return list(files.values())
    chosen = step or list(files)[-1]
    if chosen not in files:
        raise DumpError(f"--step {step}: {path} holds no {step}.jsonl; write all, or one of {', '.join(files)}")
    return [files[chosen]]


def read(file: Path) -> Iterator[Sample]:
    """Yield the samples of a file."""
    for number, line in enumerate(
        file.read_bytes().split(b"\n")
    ):  # not splitlines(): texts may hold other line separators
        if not line:
            continue
        try:
            sample = {"sample": number, **json.loads(line.decode("utf-8"))}
            float(sample.get("score") or 0)
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"is not a sample as trainer.rollout_data_dir holds them: {error}: remove the line"
            raise DumpError(f"{file}, line {number + 1}: {reason}") from error
        yield sample


def select(samples: Iterator[Sample], args: argparse.Namespace) -> list[Sample]:
    """Return the samples that match the filters of the command line."""
    found = []
    for each in samples:
        score = None if each.get("score") is None else float(each["score"])  # JSON has NaN and infinity as text
        above = args.min_score is None or (score is not None and score >= args.min_score)
        below = args.max_score is None or (score is not None and score <= args.max_score)
        if above and below and (args.find is None or args.find in f"{each.get('input')}\n{each.get('output')}"):
            found.append(each)
    return found


def table_of(samples: list[Sample]) -> Table:
    """Return a table with one line per sample."""
    table = Table("step", "sample", "score", "input", "output", "gts")
    for each in samples:
        texts = [_short(each.get(name)) for name in TEXTS]
        table.add_row(str(each.get("step", "")), str(each["sample"]), _score(each), *texts)
    return table


def panels_of(sample: Sample) -> Iterator[Panel]:
    """Yield panels that show a sample in full."""
    for name in TEXTS:
        yield Panel(Text(str(sample.get(name))), title=name, title_align="left")
    rest = {name: value for name, value in sample.items() if name not in TEXTS}
    yield Panel(Text("\n".join(f"{name}: {value}" for name, value in rest.items())), title="scores", title_align="left")


def _short(value: str | None) -> Text:
    text = " ".join(str(value).split())
    return Text(text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 3]}...")


def _score(sample: Sample) -> str:
    score = sample.get("score")
    return f"{score:.3f}" if isinstance(score, int | float) else str(score)


def browse(console: Console, samples: list[Sample]) -> None:
    """Ask for a line of the table and show its sample in full, until the input ends."""
    while True:
        try:
            answer = console.input(f"line of the table (1 to {len(samples)}), or Enter to quit: ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not answer:
            return
        if answer.isdigit() and 1 <= int(answer) <= len(samples):
            console.print(*panels_of(samples[int(answer) - 1]))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of dumps, or one <step>.jsonl")
    parser.add_argument("--step", help="training step, or all (default: the newest)")
    parser.add_argument("--min-score", type=_number, help="only samples with at least this score")
    parser.add_argument("--max-score", type=_number, help="only samples with at most this score")
    parser.add_argument("--find", help="only samples with this text in input or output")
    parser.add_argument("--show", type=int, metavar="SAMPLE", help="show this sample in full instead of a table")
    parser.add_argument("--limit", type=int, default=50, help="maximum number of lines (default: 50)")
    return parser


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None


def main(arguments: list[str] | None = None) -> int:
    """Print the selected samples; return the exit code."""
    args = build_parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        files = dump_files(args.path, args.step)
        samples = select((sample for file in files for sample in read(file)), args)
    except (DumpError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if args.show is not None:
        samples = [each for each in samples if each["sample"] == args.show]
        for each in samples:
            console.print(*panels_of(each))
    else:
        console.print(table_of(samples[: args.limit]))
        console.print(f"{min(len(samples), args.limit)} of {len(samples)} samples", style="dim")
    if not samples:
        sys.stderr.write("no sample matches\n")
        return 1
    if args.show is None and sys.stdin.isatty() and sys.stdout.isatty():
        browse(console, samples[: args.limit])
    return 0


if __name__ == "__main__":
    sys.exit(main())
