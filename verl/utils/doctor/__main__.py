"""Say what can run here: ``python -m verl.utils.doctor``; the exit code is 1 where something is bad."""

import argparse
import json
import sys

from verl.utils.console import get_console
from verl.utils.doctor.checks import BAD, NOTE, OK, Finding, examine
from verl.utils.doctor.environment import read_environment

_SIGNS = {OK: "ok  ", NOTE: "note", BAD: "BAD "}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks from the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m verl.utils.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="leave out the imports of the engines, which take a minute"
    )
    given = parser.parse_args(arguments)
    findings = examine(read_environment(), with_imports=not given.quick)
    healthy = all(finding.status != BAD for finding in findings)
    if given.json:
        text = json.dumps({"healthy": healthy, "findings": [finding.as_dict() for finding in findings]}, indent=2)
        get_console().info("%s", text)
    else:
        get_console().info("%s", as_text(findings))
    return 0 if healthy else 1


def as_text(findings: list[Finding]) -> str:
    """Return the findings by area, each with its fix below it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for area in dict.fromkeys(finding.area for finding in findings):
        lines += ["", area]
        for finding in (each for each in findings if each.area == area):
            lines.append(f"  {_SIGNS[finding.status]} {finding.name:<{width}}  {finding.detail}")
            if finding.fix and finding.status != OK:
                lines.append(f"       {'':<{width}}  -> {finding.fix}")
    bad = sum(finding.status == BAD for finding in findings)
    lines += ["", f"{bad} of {len(findings)} checks are bad" if bad else "nothing stands in the way of a run"]
    return "\n".join(lines[1:])


if __name__ == "__main__":
    sys.exit(main())
