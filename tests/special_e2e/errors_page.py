"""Try every wrong input of the tests; write their verdicts and messages, and ``docs/errors.md``, which shows some.

python -m tests.special_e2e.errors_page            all of them; exit code 1 unless every answer is clear
python -m tests.special_e2e.errors_page data tool  some groups; prints the verdicts and writes nothing
python -m tests.special_e2e.errors_page --page     writes the page from the messages, and tries nothing
"""

import json
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
from textwrap import shorten as shorten_text

from verl.trainer.config.invocation import NOT_LOOKED_AT

from .conftest import REPOSITORY, Workspace
from .wrong_input_cases import CASES
from .wrong_inputs import VERDICTS, Answer, Case, LateRuns, Launcher, Place, verdict

PAGE = REPOSITORY / "docs" / "errors.md"
ANSWERS = Path(__file__).with_name("wrong_input_answers.json")
"""The verdict and the message of every wrong input, by its id."""
MOST_CHARACTERS = 400
PAGE_CHARACTERS = 240
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
SHOWN = (
    "config: a key that does not exist",
    "config: a word where a number goes",
    "config: a key that was replaced",
    "config: no rollout engine",
    "config: neither micro-batch key",
    "config: a mini-batch that does not divide the batch",
    "config: tensor parallelism that does not divide the workers",
    "config: Ulysses without padding removal",
    "config: a misspelled advantage estimator",
    "config: training on GPUs without one",
    "config: more workers than cores",
    "config: a tracker that is not installed",
    "config: an override with an open bracket",
    "data: a file that does not exist",
    "data: a truncated file",
    "data: fewer rows than a batch",
    "data: no prompt column",
    "data: a string as prompt",
    "data: a row without ground truth",
    "data: a data_source that no scorer knows",
    "data: images for a text model",
    "data: a prompt that is too long",
    "reward: a function that is not in the file",
    "reward: too few parameters",
    "reward: a module that cannot be imported",
    "reward: raises",
    "reward: returns a dict without a score",
    "checkpoint: a tracker of a step that is not there",
    "checkpoint: a truncated model file",
    "checkpoint: another number of workers",
    "checkpoint: tensors of another model",
    "model: a folder that does not exist",
    "model: no tokenizer",
    "model: no chat template",
    "model: a context that is too short",
    "model: a reference with another vocabulary",
    "code: a tool of a misspelled class",
    "sft: rows of reinforcement learning",
    "tool: gsm8k: a data set of the hub without network",
    "tool: merger: an empty folder",
)
"""What people meet most."""
EXCEPTIONS = """## Exceptions

`verl.errors` has the exceptions that code of yours may catch ([API: exceptions](api/errors.md)). `WrongInput` is the
root of what a user can correct, `WorkerError` of what fails in workers. For a configuration `verl.base_config` has
`ConfigError`, a `WrongSetting` with the list `violations`, and `UnsupportedConfigError`, which is an `UnsupportedInput`
too.
"""
HEAD = """# Messages

The messages that people meet most: search the page for a part of yours. Each names the key, file or row, its value, and
what to write instead; `…` stands for a folder.

- The command finds nearly all before it imports Ray, within seconds. `--check` finds the same and starts nothing.
- Unknown keys and values of the wrong type end the command at once; one message lists all other problems.
- Only your code or the workers can find those marked with ◦; `error.log` in `trainer.default_local_dir` then holds the
  whole trace.
- The exit code is 2 for a wrong input, and 1 for any other failure.

`tests/special_e2e/wrong_input_cases.py` lists {count} wrong inputs. Each ends with exit code 2 and a message of at most
five lines, or of one line for each problem (`tests/special_e2e/wrong_input_answers.json`).
`python -m tests.special_e2e.errors_page` tries them and writes this page; `scripts/test.sh` tries a selection.
"""


def row_of(case: Case) -> str:
    """Return the first cell of a case, by which the page is searched."""
    return f"| {case.name}{' ◦' if case.late else ''} |"


def shorten(message: str, folders: list[Path]) -> str:
    """Return a message without folders, names of actors and what is the same everywhere."""
    for folder in folders:
        message = message.replace(str(folder), "…")
    message = re.sub(r"worker rank .*?, step \d+: ", "worker rank 0 raised ", message)
    lines = [line.strip().removeprefix("error in the configuration: ") for line in message.strip().splitlines()]
    kept = [line for line in lines if line and not line.startswith(("The whole trace is in", NOT_LOOKED_AT))]
    text = "; ".join(kept).replace(":; ", ": ")
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rstrip() + " ..."


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


def cell_of(message: str) -> str:
    """Return the beginning of a message, without what ends a cell."""
    return shorten_text(message.replace("`", ""), PAGE_CHARACTERS, placeholder=" ...").replace("|", chr(92) + "|")


def page(messages: dict[str, str]) -> str:
    """Return the page from the message of each wrong input."""
    parts = [HEAD.format(count=len(CASES))]
    for group, title in TITLES.items():
        rows = [
            f"{row_of(case)} `{cell_of(messages[case.id])}` |\n"
            for case in CASES
            if case.group == group and case.id in SHOWN
        ]
        if rows:
            parts.append(f"## {title}\n\n| input | message |\n|---|---|\n{''.join(rows)}")
    return "\n".join([*parts, EXCEPTIONS])


def known_answers() -> dict[str, dict[str, str]]:
    """Return the verdict and the message of each wrong input, as the last run of all has written them."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def write(answers: dict[str, dict[str, str]]) -> None:
    """Write the verdicts and messages, and the page."""
    ANSWERS.write_text(json.dumps(answers, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page({name: answer["message"] for name, answer in answers.items()}), encoding="utf-8")


def main(groups: list[str]) -> int:
    """Try the cases and write what they answer; return the exit code."""
    if groups == ["--page"]:
        write(known_answers())
        return 0
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
            folders = [folder, REPOSITORY]
            messages = {name: shorten(answer.message, [answer.folder, *folders]) for name, answer in answers.items()}
            write({c.id: {"verdict": verdicts[c.id], "message": messages[c.id]} for c in CASES})
    return 0 if set(verdicts.values()) == {"clear"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
