"""Let the API pages show a section of a docstring that starts on the line of its name; mkdocs.yml loads this.

``Raises: ValueError when ...`` may go on in indented lines. Griffe would take those for the items of a section, find
none, and drop them; without their indentation it keeps the paragraph.
"""

import re
from typing import Any

import griffe

_STARTS_IN_LINE = re.compile(r"^(Args|Attributes|Raises|Returns|Source|Yields): \S")


def joined(text: str) -> str:
    """Return a docstring in which such a paragraph is not indented."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if _STARTS_IN_LINE.match(line):
            inside = True
        elif not line.startswith(" "):
            inside = False
        lines.append(line.strip() if inside else line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings as they are read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = joined(obj.docstring.value)
