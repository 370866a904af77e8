"""A worker dies in the middle of a phase while its peer waits in a collective."""

import time

import pytest

from .test_train import TWO_WORKERS, assert_names_the_death

POINTS = {"generate": "generate", "weight_sync": "generate"}
"""Where the worker dies, and the phase of the driver at that time."""


@pytest.mark.parametrize("point", POINTS)
def test_a_death_ends_the_run_at_once(workspace, tmp_path, point):
    fault = {"VERL_FAULT": f"kill:{point}:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = workspace.train(f"die-in-{point}", TWO_WORKERS, env=fault, fails=True)
    died_at, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith(point)
    assert time.time() - float(died_at) < 60
    assert_names_the_death(run.output, 1, POINTS[point], 2)
