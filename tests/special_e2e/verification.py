"""Tables of measured figures in a page of the documentation, written by the tests that measure them."""

from pathlib import Path


def record(page: Path | None, heading: str, row: list[str]) -> None:
    """Put a row into the table below a heading of a page; it replaces the row with the same first cell.

    Raises: ValueError when the page has no such heading with a table.
    """
    if page is None:
        return
    lines = page.read_text().splitlines()
    start = lines.index(heading) if heading in lines else len(lines)
    table = [at for at in range(start, len(lines)) if lines[at].startswith("|")]
    if not table:
        raise ValueError(f"{page} has no table below {heading!r}")
    first, end = table[0], table[0]
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    rows = {line.split("|")[1].strip(): line for line in lines[first + 2 : end]}
    rows[row[0]] = "| " + " | ".join(row) + " |"
    lines[first + 2 : end] = rows.values()
    page.write_text("\n".join(lines) + "\n")
