"""The reward of InfiGUI-G1 for pointing at an element of a screen; a response may name several candidates.

A response is ``<think>...</think>`` and a JSON list of candidates, the likeliest first:
``[{"point_2d": [x, y]}, ...]``. Where the prompt has opened the thought, the response starts inside it.

Source: InfiGUI-G1 (arXiv:2508.05731), section 3 (adaptive exploration reward).
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

ANSWER = re.compile(
    r"(?:\s*<think>|(?!.*<think>)).*?</think>\s*(?:```(?:json)?\s*(\[.*\])\s*```|(\[.*\]))\s*", re.DOTALL
)
BOX_KEYS = ("x1", "y1", "x2", "y2")
FEWEST_IN_LINE = 3
"""Two points are always on a line."""

Point = tuple[float, float]


def aer_gui_reward_function(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[float] | Mapping[str, float],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Return the reward of a response and its parts.

    A response in another format has ``score`` 0. Otherwise the score is 1 for the format, plus ``accuracy_reward``.
    ``acc`` is 1 if the first candidate hits the element.

    Args: ``ground_truth`` is the box [left, top, right, bottom] of the element, a mapping of x1, y1, x2 and y2, or
        either as JSON.
    Raises: ValueError for a ground truth that is not a box.
    """
    box = read_box(ground_truth)
    points = read_points(solution_str)
    if points is None:
        return {"score": 0.0, "format": 0.0, "accuracy": 0.0, "num_candidates": 0.0, "any_hit": 0.0, "acc": 0.0}
    hits = [is_inside(point, box) for point in points]
    accuracy = accuracy_reward(points, hits)
    return {
        "score": 1.0 + accuracy,
        "format": 1.0,
        "accuracy": accuracy,
        "num_candidates": float(len(points)),
        "any_hit": float(any(hits)),
        "acc": float(hits[0]),
    }


def accuracy_reward(points: Sequence[Point], hits: Sequence[bool]) -> float:
    """Return the efficiency of the candidates: utility over cost.

    If the k-th of N candidates is the first to hit, the reward is 1 / sqrt(N k): N is the cost of proposing the
    candidates, k the cost of trying them, and the geometric mean of both is the cost. Without a hit the reward is
    -1 / N, so that failing with more candidates costs less. Three or more candidates on one line are not an
    exploration: the reward is -1.
    """
    count = len(points)
    if count >= FEWEST_IN_LINE and are_in_line(points):
        return -1.0
    if True not in hits:
        return -1.0 / count
    return 1.0 / math.sqrt(count * (hits.index(True) + 1))


def are_in_line(points: Sequence[Point]) -> bool:
    """Return whether all points are on one line, the line through the first point and the one farthest from it."""
    x, y = points[0]
    far_x, far_y = max(points, key=lambda point: math.hypot(point[0] - x, point[1] - y))
    return all((far_x - x) * (b - y) == (far_y - y) * (a - x) for a, b in points)


def is_inside(point: Point, box: Sequence[float]) -> bool:
    """Return whether a point is in the box, borders included."""
    left, top, right, bottom = box
    return left <= point[0] <= right and top <= point[1] <= bottom


def read_points(response: str) -> list[Point] | None:
    """Return the candidates of a response; None if its format is wrong or it has no candidate."""
    found = ANSWER.fullmatch(response)
    if found is None:
        return None
    try:
        candidates = json.loads(found[1] or found[2])
    except (ValueError, RecursionError):
        return None
    points = [each.get("point_2d") if isinstance(each, dict) else None for each in candidates]
    if not points or not all(_are_numbers(point, 2) for point in points):
        return None
    return [(float(x), float(y)) for x, y in points]


def read_box(ground_truth: Any) -> list[float]:
    """Return left, top, right and bottom.

    Raises: ValueError if the ground truth is not a box.
    """
    box = ground_truth
    if isinstance(box, str):
        try:
            box = json.loads(box)
        except ValueError:
            pass
    if isinstance(box, Mapping) and set(BOX_KEYS) <= set(box):
        box = [box[key] for key in BOX_KEYS]
    box = box.tolist() if hasattr(box, "tolist") else box
    if not _are_numbers(box, 4) or box[0] > box[2] or box[1] > box[3]:
        raise ValueError(f"the ground truth must be a box [left, top, right, bottom], got {ground_truth!r}")
    return [float(edge) for edge in box]


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list | tuple) and len(values) == count and all(map(_is_number, values))


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; JSON allows larger integers."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
