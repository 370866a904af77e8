"""The mathematics gives what it gave before it was written as formulas; see `golden_cases.py`."""

import numpy as np
import pytest

from tests.algos.golden_cases import FILE, GROUPS, compute


@pytest.mark.parametrize("group", GROUPS)
def test_results_are_those_of_the_golden_file(group: str) -> None:
    with np.load(FILE) as stored:
        golden = {name: stored[name] for name in stored.files}
    found = compute(group)
    assert found and found.keys() <= golden.keys()
    for name, value in found.items():
        assert np.isfinite(golden[name]).all(), name
        scale = np.abs(golden[name]).max(initial=0.0)  # of numbers that cancel to almost nothing
        np.testing.assert_allclose(value, golden[name], rtol=1e-10, atol=1e-13 * scale, err_msg=name)
