"""A Griffe extension (see mkdocs.yml) that keeps one-line docstring sections such as ``Raises: ...`` on the API pages.

Their text may continue on indented lines. Griffe takes indented lines for the items of a section, finds that they are
not, and drops them. Without the indentation it shows them as a paragraph.
"""

import re
from typing import Any

import griffe

_STARTS_IN_LINE = re.compile(r"^(Args|Attributes|Raises|Returns|Source|Yields): \S")


def joined(text: str) -> str:
    """Remove the indentation of the continuation lines of such sections."""
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
    """Rewrites each docstring when Griffe reads it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = joined(obj.docstring.value)
