r"""Score MATH: compare the content of the last ``\boxed`` with the ground truth by ``answers``, without algebra."""

import re

from verl.utils.reward_score.answers import same

BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
BARE = re.compile(r"[^\s$]+")


def compute_score(solution_str: str, ground_truth: str) -> float:
    r"""Return 1 if the last boxed answer is equivalent to the ground truth, else 0."""
    boxed = last_boxed_only_string(solution_str)
    return float(boxed is not None and is_equiv(remove_boxed(boxed), str(ground_truth)))


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` (or ``\fbox``, or ``\boxed x``) with its braces balanced; None without one."""
    closing: dict[int, int] | None = None
    for match in reversed(list(BOXED.finditer(string))):
        start = match.end()
        if start < len(string) and string[start] == "{":
            closing = _closing_braces(string) if closing is None else closing
            end = closing.get(start)
            if end is not None:
                return string[match.start() : end + 1]
        elif bare := BARE.match(string, start):
            return string[match.start() : bare.end()]
    return None


def remove_boxed(string: str) -> str:
    r"""Return the content of a ``\boxed{...}``.

    Raises: ValueError if the text does not start with one.
    """
    match = BOXED.match(string)
    if match is None:
        raise ValueError(f"no boxed answer in {string!r}")
    content = string[match.end() :]
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Return whether two answers are equivalent."""
    if str1 is None or str2 is None:
        return str1 is str2
    return same(str1, str2)


def _closing_braces(string: str) -> dict[int, int]:
    """Map the position of each opening brace to the position of its closing brace, in one pass over a long response."""
    open_braces: list[int] = []
    closing: dict[int, int] = {}
    for i, character in enumerate(string):
        if character == "{":
            open_braces.append(i)
        elif character == "}" and open_braces:
            closing[open_braces.pop()] = i
    return closing
