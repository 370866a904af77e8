"""Docstrings on the API pages keep what they say."""

import pytest

pytest.importorskip("griffe", reason="the extra docs is not installed")

from scripts.griffe_docstrings import joined

TEXT = """Do it.

Raises: ValueError for a value
    that is wrong; SystemExit
    otherwise.

Args:
    value: indented, as a list is.
"""


def test_a_section_in_a_line_is_a_paragraph_and_a_list_stays_one() -> None:
    assert joined(TEXT).splitlines() == [
        "Do it.",
        "",
        "Raises: ValueError for a value",
        "that is wrong; SystemExit",
        "otherwise.",
        "",
        "Args:",
        "    value: indented, as a list is.",
    ]
