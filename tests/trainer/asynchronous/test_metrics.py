"""The share of an update in which the servers work, by hand."""

import pytest

from verl.trainer.asynchronous.metrics import overlap
from verl.utils.observe.timeline import Span


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([(0.0, 20.0)], 1.0),
        ([(0.0, 11.0), (18.0, 30.0)], 0.3),
        ([(11.0, 13.0), (12.0, 14.0), (12.5, 13.5)], 0.3),
        ([(21.0, 30.0), (0.0, 9.0)], 0.0),
    ],
)
def test_overlap(spans: list[tuple[float, float]], share: float) -> None:
    assert overlap([Span("group", *span) for span in reversed(spans)], 10.0, 20.0) == pytest.approx(share)
