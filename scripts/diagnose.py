"""Report which parts of verl run on this machine and in this environment, and how to fix the others.

    python scripts/diagnose.py [--json] [--quick]

The same as ``python -m verl.utils.doctor``, for a checkout in which verl is not installed yet.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    try:
        from verl.utils.doctor.__main__ import main as doctor
    except ImportError as error:
        sys.stderr.write(
            f"{sys.executable} cannot import verl: {error}\n"
            "  -> activate the project's environment, or install the project: pip install -e .\n"
        )
        return 1
    return doctor(arguments)


if __name__ == "__main__":
    sys.exit(main())
