"""Check this machine and environment: ``python -m verl.utils.doctor``. Exits with 1 if a check finds a problem."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from verl.utils.observe.console import get_console

if TYPE_CHECKING:
    from verl.utils.doctor.checks import Finding

_SIGNS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser("python -m verl.utils.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="skip importing the engines, which takes a minute")
    given = parser.parse_args(arguments)
    try:
        from verl.utils.doctor import checks
    except ImportError as error:  # the doctor's own packages are missing: often the wrong Python
        text = f"{sys.executable} cannot run the checks: {error}"
        fix = "activate the project's environment, or install the project: pip install -e ."
        if given.json:
            found = {"area": "machine", "name": "Python", "status": "bad", "detail": text, "fix": fix}
            get_console().info("%s", json.dumps({"healthy": False, "findings": [found]}, indent=2))
        else:
            get_console().info("%s\n  -> %s", text, fix)
        return 1
    findings = checks.examine(checks.read_environment(), with_imports=not given.quick)
    healthy = all(finding.status != "bad" for finding in findings)
    if given.json:
        text = json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2)
    else:
        text = as_text(findings)
    get_console().info("%s", text)
    return 0 if healthy else 1


def as_text(findings: "list[Finding]") -> str:
    """Format the findings by area, each with its fix below it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for area in dict.fromkeys(finding.area for finding in findings):
        lines += ["", area]
        for finding in (each for each in findings if each.area == area):
            lines.append(f"  {_SIGNS[finding.status]} {finding.name:<{width}}  {finding.detail}")
            if finding.fix and finding.status != "ok":
                lines.append(f"       {'':<{width}}  -> {finding.fix}")
    bad = sum(finding.status == "bad" for finding in findings)
    lines += ["", f"{bad} of {len(findings)} checks found a problem" if bad else "no problems: runs can start"]
    return "\n".join(lines[1:])


if __name__ == "__main__":
    sys.exit(main())
