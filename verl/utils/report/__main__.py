"""Write a run's HTML report, compare two runs, or watch a run.

``python -m verl.utils.report RUN_DIR`` writes the report. ``... compare RUN_A RUN_B`` names the first phase in which
the two runs differ and exits with 1 if there is one. ``... live RUN_DIR`` follows a run that another process makes.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from verl.utils.observe.console import get_console
from verl.utils.observe.record import record_of
from verl.utils.process.owner import has_owner
from verl.utils.report.compare import compare_runs
from verl.utils.report.page import REPORT_NAME, write_report


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    commands = {"compare": _compare, "live": _live}
    try:
        if words and words[0] in commands:
            return commands[words[0]](words[1:])
        return _report(words)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _report(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m verl.utils.report", description=__doc__)
    parser.add_argument("run_dir", help="trainer.default_local_dir of the run, or its metrics.jsonl")
    parser.add_argument("--output", help=f"HTML file to write, or its folder (default: RUN_DIR/{REPORT_NAME})")
    given = parser.parse_args(words)
    get_console().info("report: %s", write_report(given.run_dir, given.output))
    return 0


def _compare(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m verl.utils.report compare", description="Name the first step and phase in which two runs differ."
    )
    parser.add_argument("run_a", help="trainer.default_local_dir of the first run")
    parser.add_argument("run_b", help="trainer.default_local_dir of the second run")
    given = parser.parse_args(words)
    result = compare_runs(given.run_a, given.run_b)
    what = "digests and metrics" if result.by_digests else "metrics (not every step has digests)"
    steps = f"{len(result.steps)} common steps, {result.steps[0]} to {result.steps[-1]}"
    for run, count in zip((given.run_a, given.run_b), result.alone, strict=True):
        steps += f"; {count} more only in {run}" if count else ""
    if result.difference is None:
        get_console().info("equal in %s over %s", what, steps)
        return 0
    get_console().info("first difference, by %s over %s: %s", what, steps, result.difference)
    return 1


def _live(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m verl.utils.report live",
        description="Show the metrics of a run while another process makes it, until it has ended.",
    )
    parser.add_argument("run_dir", help="trainer.default_local_dir of the run")
    parser.add_argument("--steps", type=int, help="exit after this many training steps")
    given = parser.parse_args(words)
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is None:
        raise ImportError("the live table needs the package rich; install it with: pip install rich")
    from verl.utils.report.live import watch

    folder = Path(given.run_dir)
    watch(folder if has_owner(folder) else record_of(folder).parent, steps=given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
