"""Try every wrong input of the tests, and write ``docs/errors.md``: the verdicts, and each input with its message.

python -m tests.special_e2e.errors_page            all of them; exit code 1 unless every answer is clear
python -m tests.special_e2e.errors_page data tool  some groups; prints the verdicts and writes nothing
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

from verl.trainer.config.invocation import NOT_LOOKED_AT

from .conftest import REPOSITORY, Workspace
from .wrong_input_cases import CASES
from .wrong_inputs import VERDICTS, Answer, Case, LateRuns, Launcher, Place, verdict

PAGE = REPOSITORY / "docs" / "errors.md"
MOST_CHARACTERS = 400
LATE_TIMEOUT_S = 1800
TITLES = {
    "config": "Configuration",
    "data": "Data",
    "reward": "Reward function",
    "checkpoint": "Checkpoint",
    "model": "Model and tokenizer",
    "environment": "Environment",
    "code": "Your code",
    "sft": "Supervised training",
    "offline": "Generation and evaluation",
    "tool": "Other commands",
}
HEAD = (
    "# Messages\n\n"
    "Messages for wrong input, of `python -m verl.trainer.main_ppo` unless the section says otherwise. Nearly all are "
    "found before Ray is imported, within seconds; modules of yours, which a process of its own imports, take the "
    "longest. Unknown keys and values of the wrong type "
    "end the command at once. All other problems come in one message, and `--check` finds all of both kinds. Only "
    "your code or the workers can find those marked with ◦; `error.log` in `trainer.default_local_dir` then holds the "
    "whole trace. The exit code is 2 for a wrong input, and 1 for any other failure.\n\n"
    "`tests/special_e2e/wrong_input_cases.py` lists the inputs. `python -m tests.special_e2e.errors_page` tries them "
    "and writes this page; `scripts/test.sh` tries a selection, and `scripts/test.sh --full` all. A program judges the "
    "answers. *Clear* means: exit code 2, at most five lines or a line for each of several problems, the key, file or "
    "row, the value, and what to write instead. "
    "*Unclear* is any other refusal, *hung* takes longer than a minute, and *accepted* is not refused. `…` "
    "stands for a folder.\n"
)


def row_of(case: Case) -> str:
    """Return the first cell of a case, by which the page is searched."""
    return f"| {case.name}{' ◦' if case.late else ''} |"


def shorten(message: str, folders: list[Path]) -> str:
    """Return a message as a cell: without folders, names of actors and what is the same everywhere."""
    for folder in folders:
        message = message.replace(str(folder), "…")
    message = re.sub(r"worker rank .*?, step \d+: ", "worker rank 0 raised ", message)
    lines = [line.strip().removeprefix("error in the configuration: ") for line in message.strip().splitlines()]
    kept = [line for line in lines if line and not line.startswith(("The whole trace is in", NOT_LOOKED_AT))]
    text = "; ".join(kept).replace(":; ", ": ")
    text = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rstrip() + " ..."
    return f"`{text.replace('`', '').replace('|', chr(92) + '|')}`"


def try_cases(cases: list[Case], folder: Path, workspace: Workspace) -> Iterator[tuple[Case, Answer]]:
    """Yield each case with its answer, those that only a run can find last."""
    late = [case for case in cases if case.late]
    early = [case for case in cases if not case.late]
    (folder / "late").mkdir()
    with ExitStack() as stack:
        runs = stack.enter_context(LateRuns(late, workspace, folder / "late")) if late else None
        launchers: Queue[Launcher] = Queue()
        for _ in range(os.cpu_count() or 1):
            launchers.put(stack.enter_context(Launcher()))

        def answer(number: int) -> Answer:
            launcher = launchers.get()
            try:
                return launcher.run(early[number], Place(folder / str(number), workspace))
            finally:
                launchers.put(launcher)

        pool = stack.enter_context(ThreadPoolExecutor(launchers.qsize()))
        yield from zip(early, pool.map(answer, range(len(early))), strict=True)
        if runs is not None:
            yield from ((case, runs.answer(case, LATE_TIMEOUT_S)) for case in late)


def count_table(verdicts: dict[str, str]) -> str:
    """Return the number of each verdict by group, as a table."""
    lines = [f"| inputs | {' | '.join(VERDICTS)} |", f"|---|{'---|' * len(VERDICTS)}"]
    for group, title in [*TITLES.items(), ("", "all")]:
        counts = Counter(found for name, found in verdicts.items() if name.startswith(f"{group}:" if group else ""))
        lines.append(f"| {title} | {' | '.join(str(counts[name]) for name in VERDICTS)} |")
    return "\n".join(lines) + "\n"


def write_page(answers: dict[str, Answer], verdicts: dict[str, str], workspace: Path) -> None:
    """Write the page from the answer and the verdict of every case; ``workspace`` is a folder that it does not show."""
    parts = [HEAD, count_table(verdicts)]
    for group, title in TITLES.items():
        rows = []
        for case in (case for case in CASES if case.group == group):
            cell = shorten(answers[case.id].message, [answers[case.id].folder, workspace, REPOSITORY])
            rows.append(f"{row_of(case)} {cell} |\n")
        parts.append(f"## {title}\n\n| input | message |\n|---|---|\n{''.join(rows)}")
    PAGE.write_text("\n".join(parts))


def main(groups: list[str]) -> int:
    """Try the cases and write the page; return the exit code."""
    cases = [case for case in CASES if not groups or case.group in groups]
    answers: dict[str, Answer] = {}
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case, answer in try_cases(cases, folder, Workspace(folder)):
            answers[case.id] = answer
            verdicts[case.id], why = verdict(case, answer)
            if why:
                print(f"{verdicts[case.id]}: {case.id}: {why}\n", flush=True)
        print(count_table(verdicts))
        if not groups:
            write_page(answers, verdicts, folder)
    return 0 if set(verdicts.values()) == {"clear"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
