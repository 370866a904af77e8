"""Write ``docs/errors.md``: every wrong input of the tests with its message.

python -m tests.special_e2e.errors_page
"""

import re
import tempfile
from pathlib import Path

from .conftest import REPOSITORY, Workspace
from .wrong_input_cases import CASES
from .wrong_inputs import GROUPS, Case, LateRuns, Launcher, Place, words

PAGE = REPOSITORY / "docs" / "errors.md"
MOST_CHARACTERS = 400
TITLES = {
    "config": "Configuration",
    "data": "Data",
    "reward": "Reward function",
    "checkpoint": "Checkpoint",
    "model": "Model path",
}
HEAD = (
    "# Messages\n\n"
    "Messages of `python -m verl.trainer.main_ppo` for wrong input. Nearly all errors are found before Ray starts, in "
    "a second or two and without importing torch; the exit code is 2. Only your code or the workers can find those "
    "marked with ◦; the exit code is 1, and `error.log` in `trainer.default_local_dir` holds the whole trace.\n\n"
    "`tests/special_e2e/wrong_input_cases.py` lists the inputs, and a test tries each. `python -m "
    "tests.special_e2e.errors_page` writes this page. `…` stands for a folder.\n"
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
    kept = [line for line in lines if line and not line.startswith("The whole trace is in")]
    text = "; ".join(kept).replace(":; ", ": ")
    text = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rstrip() + " ..."
    return f"`{text.replace('`', '').replace('|', chr(92) + '|')}`"


def write_page(folder: Path) -> None:
    """Try all cases and write the page."""
    workspace = Workspace(folder)
    cells: dict[str, str] = {}
    late = [case for case in CASES if case.late]
    (folder / "late").mkdir()
    with LateRuns(late, workspace, folder / "late") as runs, Launcher() as launcher:
        for number, case in enumerate(case for case in CASES if not case.late):
            place = Place(folder / str(number), workspace)
            answer = launcher.run(words(case, place), place.folder)
            cells[case.id] = shorten(answer.message, [place.folder, folder])
        for case in late:
            cells[case.id] = shorten(runs.message(case), [runs.folder(case), folder])
    parts = [HEAD]
    for group in GROUPS:
        rows = [f"{row_of(case)} {cells[case.id]} |\n" for case in CASES if case.group == group]
        parts.append(f"## {TITLES[group]}\n\n| input | message |\n|---|---|\n{''.join(rows)}")
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write_page(Path(temporary))
